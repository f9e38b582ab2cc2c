"""The HTML report in a real browser, driven through the DevTools protocol over a pipe (no port, no dependency)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from browsers import NAMES, PROGRAM, Browser
from polyfed.reporting.html.page import write_html_report
from polyfed.runs.records import RunRecords
from run_folders import write_run

HOSTILE = "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>\"&"

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=f"no browser found: none of {', '.join(NAMES)} is installed")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "run", name=HOSTILE, description=HOSTILE, algorithm={"name": "creamfl"}
    )
    event = {"round": 4, "participant": HOSTILE, "kind": "event", "event": "client_excluded", "reason": HOSTILE}
    measured = {"round": 12, "participant": HOSTILE, "kind": "test", "metrics": {"accuracy": 1.0}}
    sent = {"round": 12, "client": HOSTILE, "direction": "up", "step": HOSTILE, "bundle": HOSTILE, "kind": HOSTILE}
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in (event, measured))
    with (folder / "ledger.jsonl").open("a") as stream:
        stream.write(json.dumps(sent | {"dtype": "float32", "bytes": 9_000_000_000}) + "\n")
    return RunRecords.load(folder)


@pytest.fixture(scope="module")
def report(records: RunRecords) -> Path:
    return write_html_report(records)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Browser]:
    browser.open(report)
    yield browser
    assert browser.complaints() == []


def cells(page: Browser, table: str, column: str) -> list[str]:
    """Visible keys (or texts) of a column, from top to bottom."""
    return page.js(
        f"(() => {{ const t = document.getElementById('{table}'); "
        f"const c = [...t.tHead.rows[0].cells].findIndex(cell => cell.textContent === '{column}'); "
        "return [...t.tBodies[0].rows].filter(r => !r.hidden)"
        ".map(r => r.cells[c].dataset.key ?? r.cells[c].textContent); })()"
    )


def heading(column: str) -> str:
    return f"[...document.querySelectorAll('#clients-table thead button')].find(b => b.textContent === '{column}')"


def test_the_script_runs_and_nothing_is_requested(page, report):
    assert page.js("document.documentElement.dataset.script") == "ready"
    urls = {event["request"]["url"] for event in page.named("Network.requestWillBeSent")}
    assert report.as_uri() in urls
    assert all(url == report.as_uri() or url.startswith("data:image/png;base64,") for url in urls)


def test_hostile_text_stays_text(page):
    assert page.js("window.pwned") is None
    assert page.js("document.querySelector('h1').textContent") == HOSTILE
    assert HOSTILE in cells(page, "clients-table", "client")
    assert page.js("document.querySelectorAll('script').length") == 1
    assert page.js("document.querySelectorAll('img:not([src^=\"data:\"])').length") == 0


def test_foreign_scripts_are_refused(browser, report):
    browser.open(report)
    browser.js("{ const s = document.createElement('script'); s.text = 'window.pwned = 1'; document.body.append(s); }")
    assert browser.js("window.pwned") is None
    assert "Content Security Policy" in json.dumps(browser.complaints())


def test_headings_sort(page):
    original = cells(page, "clients-table", "bytes up")
    page.click(heading("bytes up"))
    keys = [float(key) for key in cells(page, "clients-table", "bytes up")]
    assert keys == sorted(map(float, original), reverse=True)
    assert keys[0] == 9e9
    assert cells(page, "clients-table", "client")[0] == HOSTILE
    page.click(heading("bytes up"))
    assert [float(key) for key in cells(page, "clients-table", "bytes up")] == sorted(keys)
    states = "[...document.querySelectorAll('#clients-table [aria-sort]')].map(h => h.getAttribute('aria-sort'))"
    assert sorted(set(page.js(states))) == ["ascending", "none"]
    page.click(heading("client"))
    names = cells(page, "clients-table", "client")
    assert [name for name in names if name != HOSTILE] == sorted(name for name in names if name != HOSTILE)


def test_missing_figures_are_sorted_last_either_way(page):
    for _ in range(2):
        page.click(heading("accuracy"))
        keys = cells(page, "clients-table", "accuracy")
        assert keys[-2:] == ["", ""]
        assert "" not in keys[:-2]


def test_legends_hide_lines(page):
    drawn = "[...document.querySelector('#server .chart').querySelectorAll('.line')]"
    lines = f"{drawn}.map(line => line.classList.contains('off'))"
    assert not any(page.js(lines))
    page.click("document.querySelector('#server .chart [data-toggle=\"validation\"]')")
    keys = page.js(f"{drawn}.map(line => line.dataset.keys)")
    assert page.js(lines) == ["validation" in json.loads(each) for each in keys]
    assert any(page.js(lines))
    page.click("document.querySelector('#server .chart [data-toggle=\"validation\"]')")
    assert not any(page.js(lines))


def test_hovering_shows_the_recorded_values(page, records):
    page.mouse("document.querySelector('#server svg')", "mouseMoved", at=(0.97, 0.4))
    tip = page.js("document.querySelector('#server .tip').innerText")
    assert tip.startswith("round 12")
    assert f"{records.last('server')['image_to_text_r@5']:.2f}" in tip
    page.mouse("document.querySelector('h1')", "mouseMoved")
    assert page.js("document.querySelectorAll('.tip').length") == 0


def test_arrow_keys_move_through_the_rounds(page):
    page.js("document.querySelector('#server svg').focus()")
    shown = []
    for key in ("ArrowLeft", "ArrowLeft", "ArrowRight"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        shown.append(page.js("document.querySelector('#server .tip b').textContent"))
    assert shown == ["round 12", "round 11", "round 12"]


def test_the_slider_shows_other_rounds(page):
    image = "document.querySelector('#weights img')"
    before = page.js(f"{image}.src")
    slider = "document.querySelector('#weights input')"
    page.js(f"{slider}.value = 0; {slider}.dispatchEvent(new Event('input'))")
    assert page.js(f"{image}.src") != before
    assert page.js("document.querySelector('#weights output').textContent") == "1"
    page.js(f"{slider}.value = 2; {slider}.dispatchEvent(new Event('input'))")
    same = (
        "(async () => { const pixels = async src => { const i = new Image(); i.src = src; await i.decode(); "
        "const c = document.createElement('canvas'); [c.width, c.height] = [i.naturalWidth, i.naturalHeight]; "
        "const x = c.getContext('2d'); x.drawImage(i, 0, 0); return x.getImageData(0, 0, c.width, c.height).data; }; "
        f"const [a, b] = [await pixels({json.dumps(before)}), await pixels({image}.src)]; "
        "return a.length > 1000 && a.every((v, k) => v === b[k]); })()"
    )
    found = page.call("Runtime.evaluate", expression=same, returnByValue=True, awaitPromise=True)
    assert found["result"]["value"] is True


def test_pointing_at_a_map_shows_the_weight(page, records):
    last = records.arrays()["weights.image"][12]
    page.mouse("document.querySelector('#weights img')", "mouseMoved", at=(0.001, 0.01))
    client, sample, value = page.js(
        "[...document.querySelectorAll('#weights .tip b, #weights .tip span')].map(e => e.textContent)"
    )
    assert sample == "0 to 4"
    mean = last.values[last.clients.index(client)][:5].mean()
    assert float(value.removeprefix("≈ ")) == pytest.approx(mean, abs=0.004)


def test_events_are_filtered_by_party(page):
    assert len(cells(page, "timeline", "participant")) > 2
    select = "document.querySelector('[data-filter]')"
    page.js(f"{select}.value = 'text-1'; {select}.dispatchEvent(new Event('change'))")
    assert set(cells(page, "timeline", "participant")) == {"text-1"}
    page.js(f"{select}.value = {json.dumps(HOSTILE)}; {select}.dispatchEvent(new Event('change'))")
    assert set(cells(page, "timeline", "participant")) == {HOSTILE}


def test_clients_are_found_by_text(page):
    field = "document.querySelector('[data-search]')"
    page.js(f"{field}.value = 'TEXT-'; {field}.dispatchEvent(new Event('input'))")
    assert cells(page, "clients-table", "client") == ["text-0", "text-1", "text-2"]


@pytest.mark.parametrize("width", [400, 768, 1280])
def test_no_width_needs_sideways_scrolling(browser, report, width):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(report)
        assert browser.js("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_dark_mode(page):
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = page.js(background)
    page.call("Emulation.setEmulatedMedia", features=[])
    assert (light, dark) == ("rgb(245, 246, 248)", "rgb(15, 19, 23)")


def test_on_paper_everything_is_open_and_the_menu_is_gone(page):
    opened = "document.querySelectorAll('details[open]').length"
    page.js("window.dispatchEvent(new Event('beforeprint'))")
    assert page.js(opened) == page.js("document.querySelectorAll('details').length")
    page.call("Emulation.setEmulatedMedia", media="print")
    assert page.js("[...document.querySelectorAll('nav, .scripted')].filter(e => e.offsetParent).length") == 0
    page.call("Emulation.setEmulatedMedia", media="")
    page.js("window.dispatchEvent(new Event('afterprint'))")
    assert page.js(opened) == 0


def test_without_scripts_all_is_there(browser, report):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(report)
        assert browser.js("document.documentElement.dataset.script") is None
        assert browser.js("document.querySelectorAll('svg .line').length") > 10
        assert browser.js("document.querySelector('#weights img').naturalWidth") == 200
        shown = "[...document.querySelectorAll('.scripted')].filter(e => e.offsetParent).length"
        assert browser.js(shown) == 0
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
