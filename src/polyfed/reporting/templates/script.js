"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (name, attributes = {}, text = "") => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };
  const figure = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && size < 0.01) return value.toPrecision(3);
    return value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: size < 1 ? 4 : 2 });
  };

  /* Legends: an entry hides all lines that belong to it. */
  const hiddenKeys = (chart) =>
    new Set(all("[data-toggle][aria-pressed=false]", chart).map((button) => button.dataset.toggle));
  const isHidden = (keys, hidden) => keys.some((key) => hidden.has(key));
  for (const button of all("[data-toggle]")) {
    button.addEventListener("click", () => {
      const chart = button.closest(".chart");
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      const hidden = hiddenKeys(chart);
      for (const shape of all("[data-keys]", chart)) {
        shape.classList.toggle("off", isHidden(JSON.parse(shape.dataset.keys), hidden));
      }
    });
  }

  /* A box beside the pointer. */
  const showTip = (box, x, y, title, rows) => {
    const tip = box.querySelector(".tip") || box.appendChild(make("div", { class: "tip", role: "status" }));
    tip.replaceChildren(make("b", {}, title));
    for (const [label, value, colour] of rows) {
      const row = tip.appendChild(make("div"));
      row.append(make("i", { class: `c${colour}` }), make("span", {}, label), make("span", { class: "figure" }, value));
    }
    tip.hidden = false;
    const left = x + 14 + tip.offsetWidth > box.clientWidth ? x - 14 - tip.offsetWidth : x + 14;
    const rightmost = Math.max(0, box.clientWidth - tip.offsetWidth);
    tip.style.transform = `translate(${Math.min(Math.max(0, left), rightmost)}px, ${Math.max(0, y)}px)`;
  };
  const hideTip = (box) => box.querySelector(".tip")?.remove();

  /* Charts: the values of the nearest round, by pointer or arrow keys. */
  const MOST_ROWS = 12;
  for (const box of all("[data-chart]")) {
    const data = JSON.parse(box.dataset.chart);
    const svg = box.querySelector("svg");
    const { width, height } = svg.viewBox.baseVal;
    const guide = document.createElementNS("http://www.w3.org/2000/svg", "line");
    guide.setAttribute("class", "guide off");
    guide.setAttribute("y1", "26");
    guide.setAttribute("y2", String(height - 38));
    svg.append(guide);
    svg.setAttribute("tabindex", "0");
    let place = data.x.length - 1;
    const show = (index) => {
      place = Math.min(Math.max(0, index), data.x.length - 1);
      const [round, x] = data.x[place];
      const hidden = hiddenKeys(box.closest(".chart"));
      const shown = data.lines.filter((line) => line.values[place] !== null && !isHidden(line.keys, hidden));
      const rows = shown.slice(0, MOST_ROWS).map((line) => [line.label, figure(line.values[place]), line.colour]);
      if (shown.length > MOST_ROWS) rows.push([`and ${shown.length - MOST_ROWS} more`, "", 0]);
      guide.setAttribute("x1", x);
      guide.setAttribute("x2", x);
      guide.classList.remove("off");
      showTip(box, (x * box.clientWidth) / width, 6, `round ${round}`, rows);
    };
    const leave = () => {
      guide.classList.add("off");
      hideTip(box);
    };
    svg.addEventListener("pointermove", (event) => {
      const area = svg.getBoundingClientRect();
      const x = ((event.clientX - area.left) * width) / area.width;
      const distances = data.x.map(([, at]) => Math.abs(at - x));
      show(distances.indexOf(Math.min(...distances)));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      show(guide.classList.contains("off") ? place : place + step);
    });
  }

  /* Tables: a heading sorts, once more the other way; dashes stay last. */
  const keyOf = (row, column) => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const compare = (one, two, numeric) =>
    numeric ? Number(one) - Number(two) : one.localeCompare(two, "en", { numeric: true });
  for (const button of all(".sortable thead button")) {
    button.addEventListener("click", () => {
      const heading = button.parentElement;
      const table = heading.closest("table");
      const column = heading.cellIndex;
      const numeric = heading.classList.contains("number");
      const before = heading.getAttribute("aria-sort");
      const now = before === "none" ? (numeric ? "descending" : "ascending") : before === "ascending" ? "descending" : "ascending";
      for (const other of all("th[aria-sort]", table)) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", now);
      const sign = now === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
      rows.sort(([one], [two]) => {
        if (one === "" || two === "") return (one === "") - (two === "");
        return sign * compare(one, two, numeric);
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  }

  /* Filters: the rows of one participant, or those with a text in them. */
  const filter = (control, id, noun, keep) => {
    const rows = [...document.getElementById(id).tBodies[0].rows];
    let kept = 0;
    for (const row of rows) {
      row.hidden = !keep(row);
      kept += !row.hidden;
    }
    const all_ = kept === rows.length ? "" : ` of ${rows.length.toLocaleString("en")}`;
    control.parentElement.querySelector("output").textContent = `${kept.toLocaleString("en")}${all_} ${noun}`;
  };
  for (const control of all("[data-filter]")) {
    control.addEventListener("change", () =>
      filter(control, control.dataset.filter, "events", (row) => !control.value || row.dataset.participant === control.value));
  }
  for (const control of all("[data-search]")) {
    control.addEventListener("input", () => {
      const text = control.value.trim().toLowerCase();
      filter(control, control.dataset.search, "clients", (row) => row.textContent.toLowerCase().includes(text));
    });
  }

  /* Heat maps: other rounds, and the value under the pointer. */
  const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const NONE = 255;
  for (const chart of all("[data-heat]")) {
    const data = JSON.parse(chart.dataset.heat);
    const palette = bytes(data.palette);
    const [image, box] = [chart.querySelector("img"), chart.querySelector(".map")];
    const names = chart.querySelector(".rows");
    const columns = data.columns.length;
    const rounds = Object.keys(data.frames).map(Number).sort((one, two) => one - two);
    let round = rounds[rounds.length - 1];
    let rows = data.frames[round].rows;
    let levels = bytes(data.frames[round].levels);
    const paint = () => {
      names?.replaceChildren(...rows.map((name) => make("span", {}, name)));
      const canvas = make("canvas");
      [canvas.width, canvas.height] = [columns, rows.length];
      const context = canvas.getContext("2d");
      const pixels = context.createImageData(columns, rows.length);
      levels.forEach((level, place) => {
        pixels.data.set([palette[3 * level], palette[3 * level + 1], palette[3 * level + 2], level === NONE ? 0 : 255], 4 * place);
      });
      context.putImageData(pixels, 0, 0);
      image.src = canvas.toDataURL();
      image.alt = image.alt.replace(/round \d+$/, `round ${round}`);
    };
    const slider = chart.querySelector("[data-rounds]");
    slider?.addEventListener("input", () => {
      round = rounds[Number(slider.value)];
      rows = data.frames[round].rows;
      levels = bytes(data.frames[round].levels);
      slider.parentElement.querySelector("output").textContent = String(round);
      paint();
    });
    image.addEventListener("pointermove", (event) => {
      const area = image.getBoundingClientRect();
      const x = Math.min(columns - 1, Math.floor(((event.clientX - area.left) * columns) / area.width));
      const y = Math.min(rows.length - 1, Math.floor(((event.clientY - area.top) * rows.length) / area.height));
      if (x < 0 || y < 0) return;
      const level = levels[y * columns + x];
      const value = level === NONE ? "–" : `≈ ${figure(data.low + ((data.high - data.low) * level) / (NONE - 1))}`;
      showTip(box, event.clientX - area.left, event.clientY - area.top, rows[y], [[data.columns[x], value, 0]]);
    });
    image.addEventListener("pointerleave", () => hideTip(box));
  }

  /* The menu marks the part that is being read; on paper everything is open. */
  const links = new Map(all("nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((each) => each.isIntersecting)) {
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-10% 0px -80% 0px" },
  );
  for (const section of all("main > section")) seen.observe(section);
  let opened = [];
  window.addEventListener("beforeprint", () => {
    opened = all("details:not([open])");
    for (const details of opened) details.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const details of opened) details.open = false;
  });

  document.documentElement.dataset.script = "ready";
})();
