from __future__ import annotations

import base64
import io
import json
import math
import random
import re
from collections import Counter
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from run_folders import write_lines, write_run
from safetensors.torch import save_file

from polyfed.errors import RunError
from polyfed.reporting.html.axes import axes_of, round_marks, whole_marks
from polyfed.reporting.html.cells import size
from polyfed.reporting.html.charts import Key, Line, line_chart, stacked_chart
from polyfed.reporting.html.curves import spread_chart
from polyfed.reporting.html.facts import client_kinds
from polyfed.reporting.html.heat_map import Frame, HeatMap, palette_bytes
from polyfed.reporting.html.markup import Markup, escaped, tag
from polyfed.reporting.html.page import html_report, write_html_report
from polyfed.reporting.html.weights import weights
from polyfed.reporting.records import RunRecords

VOID = {"meta", "img", "input", "br"}
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;]]>"
ALL_PARTS = ["server", "curves", "partition", "traffic", "weights", "clients", "events", "configuration", "reading"]


class Page(HTMLParser):
    """A page as it is read: elements with attributes and text; raises where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, name, attributes):
        assert len({key for key, _ in attributes}) == len(attributes), f"doubled attribute in <{name}>"
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.stack.append(name)

    def handle_endtag(self, name):
        assert self.stack.pop() == name

    def handle_data(self, data):
        if not {"script", "style"} & set(self.stack):
            self.texts.append(data)

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == name]

    @property
    def parts(self) -> list[str | None]:
        return [attributes["id"] for attributes in self.of("section")]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    @property
    def charts(self) -> list[dict]:
        return [json.loads(each["data-chart"]) for each in self.of("div") if "data-chart" in each]


def page_of(folder: Path) -> Page:
    return Page(html_report(RunRecords.load(folder)))


@pytest.fixture
def full(run_folder):
    environment = {"python": "3.11.7", "device": "cpu", "versions": {"polyfed": "0.1.0", "torch": "2.13.0"}}
    (run_folder / "environment.json").write_text(json.dumps(environment))
    settings = {"name": "my run", "description": "What it is for.", "algorithm": {"name": "creamfl"}}
    settings |= {"run": {"seed": 7, "rounds": 12}}
    (run_folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return run_folder


# ---- the page


def test_a_full_run_has_every_part(full):
    page = page_of(full)
    assert page.parts == ALL_PARTS
    assert [link["href"] for link in page.of("a")] == [f"#{part}" for part in ALL_PARTS]
    for text in ("my run", "What it is for.", "creamfl", "12 of 12", "complete", "cpu", "2.13.0", "Ties count against"):
        assert text in page.text
    assert "stopped" not in page.text


def test_the_file_is_written_where_asked_and_is_the_same_each_time(full, tmp_path):
    records = RunRecords.load(full)
    path = write_html_report(records)
    assert path == full / "report.html"
    other = write_html_report(records, tmp_path / "new" / "page.html")
    assert other == tmp_path / "new" / "page.html"
    assert other.read_bytes() == path.read_bytes()
    assert [file.name for file in other.parent.iterdir()] == ["page.html"]


def test_nothing_is_loaded_from_anywhere(full):
    text = html_report(RunRecords.load(full))
    page = Page(text)
    for name, attributes in page.elements:
        assert name not in {"link", "iframe", "object", "embed", "base", "form", "video", "audio", "source"}
        for key in ("src", "href", "action", "xlink:href", "srcset", "poster", "data"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png;base64,"))
        assert not any(key.startswith("on") for key in attributes)
        assert "url(" not in (attributes.get("style") or "")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = (each["content"] for each in page.of("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "img-src data:" in policy
    assert str(full) not in text


def test_text_of_the_run_is_escaped_everywhere(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    holding = {"group": HOSTILE, "source": HOSTILE, "split": HOSTILE, "items": 3, "samples": 3, "labels": {HOSTILE: 3}}
    (folder / "partition.json").write_text(json.dumps({HOSTILE: holding}))
    settings = {key: HOSTILE for key in ("name", "description", "algorithm")}
    settings |= {
        "run": {"rounds": 2},
        "clients": {HOSTILE: {"task": HOSTILE, "models": [{"encoders": {HOSTILE: HOSTILE}}]}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "environment.json").write_text(json.dumps({"device": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    metrics = {HOSTILE: 1.0, f"{HOSTILE}_to_b_r@1": 2.0, "accuracy": 3.0}
    lines = [
        {"round": number, "party": party, "kind": kind, "metrics": metrics}
        for number in (1, 2)
        for party in ("server", HOSTILE)
        for kind in ("test", "train")
    ]
    event = {"round": 1, "party": HOSTILE, "kind": "event", "event": HOSTILE, "reason": HOSTILE}
    write_lines(folder / "metrics.jsonl", [*lines, *[event] * 9, event | {"event": "client_excluded"}])
    sent = {"round": 2, "client": HOSTILE, "direction": "up", "bytes": 9}
    sent |= {key: HOSTILE for key in ("step", "artefact", "kind", "dtype")}
    write_lines(folder / "ledger.jsonl", [sent])
    arrays = folder / "arrays" / "weights"
    arrays.mkdir(parents=True)
    for number in (1, 2):
        save_file(
            {"values": torch.rand(1, 5)}, arrays / f"round-000{number}.safetensors", {"clients": json.dumps([HOSTILE])}
        )
    page = page_of(folder)
    assert page.parts == ALL_PARTS
    assert len(page.of("script")) == 1
    assert all((image["src"] or "").startswith("data:") for image in page.of("img"))
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert page.text.count(HOSTILE) > 20


def test_a_run_that_was_killed_says_so(full):
    config = yaml.safe_load((full / "config.yaml").read_text())
    (full / "config.yaml").write_text(yaml.safe_dump(config | {"run": {"rounds": 40}}))
    whole = (full / "metrics.jsonl").read_bytes()
    (full / "metrics.jsonl").write_bytes(whole[:-20])
    page = page_of(full)
    assert "stopped after round 12 of 40" in page.text
    assert "Warning: metrics.jsonl: the last line is cut off" in page.text


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.99])
def test_logs_cut_anywhere_are_shown_as_far_as_they_go(full, share):
    for name in ("metrics", "ledger", "timing"):
        path = full / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    page = page_of(full)
    assert {"partition", "weights", "clients", "configuration"} <= set(page.parts)
    assert ("traffic" in page.parts) == (share > 0.0)


def test_an_empty_folder_has_a_page_without_parts(tmp_path):
    page = page_of(tmp_path)
    assert page.parts == ["reading"]
    assert "0 rounds" in page.text


MISSING = {
    "metrics.jsonl": {"server", "curves", "events"},
    "partition.json": {"partition"},
    "config.yaml": {"configuration"},
    "arrays": {"weights"},
    "environment.json": set(),
}


@pytest.mark.parametrize("name", MISSING)
def test_parts_without_data_are_left_out(full, name):
    (full / name).rename(full.parent / name)
    assert set(page_of(full).parts) == set(ALL_PARTS) - MISSING[name]


def test_without_ledger_time_is_shown_and_without_both_nothing(full):
    (full / "ledger.jsonl").unlink()
    page = page_of(full)
    assert "traffic" in page.parts
    assert "Where the bytes went" not in page.text
    assert "bytes up" not in page.text
    (full / "timing.jsonl").unlink()
    assert "traffic" not in page_of(full).parts


def test_a_run_without_server_model_shows_its_clients(full):
    lines = [json.loads(line) for line in (full / "metrics.jsonl").read_text().splitlines()]
    write_lines(full / "metrics.jsonl", [line for line in lines if line["party"] != "server"])
    page = page_of(full)
    assert set(page.parts) == set(ALL_PARTS) - {"server"}
    assert "server r1_sum" not in page.text
    assert "image clients, mean accuracy" in page.text


def test_a_run_without_clients_shows_its_server(tmp_path):
    lines = [{"round": n, "party": "server", "kind": "test", "metrics": {"accuracy": 3.0 * n}} for n in (0, 1, 2)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    page = page_of(tmp_path)
    assert page.parts == ["server", "reading"]
    assert "server accuracy, test 6.00 %" in page.text


def test_damage_is_an_error_that_names_the_file(full):
    (full / "environment.json").write_text("{")
    with pytest.raises(RunError, match=r"environment\.json is damaged"):
        html_report(RunRecords.load(full))
    (full / "environment.json").write_text("[]")
    with pytest.raises(RunError, match=r"environment\.json holds a list"):
        html_report(RunRecords.load(full))


def test_a_thousand_clients_fit(tmp_path):
    draw = random.Random(0)
    groups = {"image": 600, "text": 300, "paired": 100}
    clients = {f"{group}-{n:03d}": group for group, number in groups.items() for n in range(number)}
    labels = {client: {f"class {c}": draw.randint(1, 9) for c in range(100)} for client in clients}
    base = {"source": "s", "split": "t", "items": 400, "samples": 400}
    holdings = {
        client: base | {"group": group, "labels": None if group == "paired" else labels[client]}
        for client, group in clients.items()
    }
    (tmp_path / "partition.json").write_text(json.dumps(holdings))
    metrics, ledger = [], []
    for number in range(1, 21):
        for client in clients:
            found = {"accuracy": draw.random(), "loss": 1.0}
            metrics.append({"round": number, "party": client, "kind": "test", "metrics": found})
            if draw.random() < 0.3:
                event = {
                    "round": number,
                    "party": client,
                    "kind": "event",
                    "event": "client_excluded",
                    "reason": "late",
                }
                metrics.append(event)
            line = {"round": number, "client": client, "direction": "up", "step": "fit", "artefact": "w"}
            ledger.append(line | {"kind": "weights", "dtype": "float32", "bytes": 1000})
    write_lines(tmp_path / "metrics.jsonl", metrics)
    write_lines(tmp_path / "ledger.jsonl", ledger)
    for name in ("weights.image", "weights.text"):
        (tmp_path / "arrays" / name).mkdir(parents=True)
        for number in range(1, 6):
            path = tmp_path / "arrays" / name / f"round-{number:04d}.safetensors"
            save_file({"values": torch.rand(1000, 500)}, path, {"clients": json.dumps(list(clients))})
    records = RunRecords.load(tmp_path)
    text = html_report(records)
    assert len(text.encode()) < 5_000_000
    page = Page(text)
    assert {"curves", "partition", "traffic", "weights", "clients", "events"} <= set(page.parts)
    assert "the 30 with most bytes of 1,000" in page.text
    assert "the last 2,000 of" in page.text


# ---- what it says


def test_cards_carry_final_best_and_chance(full):
    records = RunRecords.load(full)
    text = page_of(full).text
    best = records.best("server", "image_to_text_r@1")
    final = records.last("server")["image_to_text_r@1"]
    expected = f"server image to text R@1, test {final:.2f} % best {best[1]:.2f} in round {best[0]} · chance 1.00"
    assert expected in text
    assert "chance 2.00" in text  # of r1_sum: 5 of 500, and 1 of 100
    assert "bytes sent 463.5 MiB up 154.5 MiB · down 309.0 MiB" in text
    assert "exclusions 2 of 1 client" in text
    assert "clients 9 4 image · 3 text · 2 paired" in text


def test_curves_hold_the_recorded_values(full):
    records = RunRecords.load(full)
    lines = {line["label"]: line["values"] for chart in page_of(full).charts for line in chart["lines"]}
    for kind in ("test", "validation"):
        series = records.series("server", "r1_sum", kind)
        assert lines[f"r1_sum {kind}"] == pytest.approx(list(series.values()), abs=1e-3)
    sent = [each / 2**20 for each in records.bytes_per_round("up").values()]
    assert lines["clients to server"] == pytest.approx(sent, rel=1e-3)


def test_galleries_that_differ_are_told(full):
    assert "image to text, gallery 500 " in page_of(full).text
    assert "chance is that of test" not in page_of(full).text
    path = full / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "validation":
            line["metrics"]["gallery_text"] = 250.0
    write_lines(path, lines)
    assert "image to text, gallery 500 (validation 250; chance is that of test)" in page_of(full).text


def test_the_table_of_clients(full):
    records = RunRecords.load(full)
    text = html_report(records)
    table = text[text.index('id="clients-table"') :]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", table[: table.index("</table>")])
    assert [name for name, _ in rows] == list(records.clients)
    columns = re.findall(r"<button[^>]*>(.*?)</button>", table[: table.index("</thead>")])
    cells = {name: dict(zip(columns[1:], re.findall(r"<td[^>]*>(.*?)</td>", row), strict=True)) for name, row in rows}
    assert cells["text-1"]["excluded"] == "2"
    assert cells["text-1"]["last reason"] == "round 5: no answer in 60 s"
    assert cells["image-0"]["accuracy"] == f"{records.last('image-0')['accuracy']:.2f}"
    assert cells["paired-0"]["accuracy"] == "–"
    assert cells["image-0"]["bytes up"] == "17.2 MiB"
    assert cells["image-0"]["rounds"] == "12"


def test_returns_are_read_off_the_ledger(full):
    lines = [json.loads(line) for line in (full / "ledger.jsonl").read_text().splitlines()]
    silent = [line for line in lines if line["client"] != "text-1" or line["round"] not in (4, 5, 6)]
    evaluated = {"round": 4, "client": "text-1", "direction": "up", "step": "evaluate:assess", "artefact": "framing"}
    write_lines(full / "ledger.jsonl", [*silent, evaluated | {"kind": "framing", "dtype": "", "bytes": 9}])
    text = page_of(full).text
    assert "7 text-1 client returned first answer after its exclusion in round 5" in text
    assert text.count("first answer after its exclusion") == 1


def test_recorded_returns_are_not_shown_twice(full):
    event = {"round": 3, "party": "text-1", "kind": "event", "event": "client_returned", "reason": "answered 'fit'"}
    with (full / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(event) + "\n")
    text = page_of(full).text
    assert "3 text-1 client returned answered 'fit'" in text
    assert "exclusion in round 3" not in text
    assert "6 text-1 client returned first answer after its exclusion in round 5" in text


@pytest.mark.parametrize("clients", [3, 12, 30])
def test_what_a_method_recorded_of_each_client_is_shown_of_few_and_of_many(tmp_path, clients):
    metrics = {f"weight.h-{k}": (k + 1) / 100 for k in range(clients)}
    lines = [{"round": n, "party": "server", "kind": "train", "metrics": metrics} for n in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    page = page_of(tmp_path)
    (chart,) = (
        chart
        for chart in page.charts
        if any(line["label"] == "mean" or "h-" in line["label"] for line in chart["lines"])
    )
    found = {line["label"]: line["values"] for line in chart["lines"]}
    if clients == 3:
        assert set(found) == {"h-0", "h-1", "h-2"}
    else:
        assert found["mean"] == pytest.approx([sum(metrics.values()) / clients] * 2, abs=1e-3)
        assert ("h-11" in found) == (clients == 12)
        assert ("highest" in found) == (clients == 30)
    assert "Recorded by the method" in page.text


def test_chance_of_accuracy_is_a_uniform_guess(tmp_path):
    line = {"round": 1, "party": "server", "kind": "validation", "metrics": {"accuracy": 60.0, "classes": 8.0}}
    write_lines(tmp_path / "metrics.jsonl", [line])
    text = page_of(tmp_path).text
    assert "server accuracy, validation 60.00 % best 60.00 in round 1 · chance 12.50" in text


def test_kinds_of_clients_come_from_the_configuration(tmp_path):
    tower = {
        "encoders": {
            "image": {"name": "resnet", "size": "tiny", "widths": [8, 16]},
            "text": {"name": "gru", "width": 64},
        }
    }
    models = [tower, {"encoders": {"image": {"name": "vit", "size": "tiny"}}}]
    clients = {"a": {"task": {"name": "retrieval"}, "models": models}, "b": {"task": "classification", "models": []}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"clients": clients}))
    names = ["a-00", "a-01", "a-02", "odd", "b-0"]
    holding = {"source": "s", "split": "t", "items": 1, "samples": 1}
    held = {name: holding | {"group": "b" if name == "b-0" else "a"} for name in names}
    (tmp_path / "partition.json").write_text(json.dumps(held))
    kinds = client_kinds(RunRecords.load(tmp_path))
    assert kinds["a-00"] == kinds["a-02"]
    assert (kinds["a-00"].modalities, kinds["a-00"].architecture) == ("image, text", "resnet 8-16 + gru 64")
    assert (kinds["a-01"].task, kinds["a-01"].modalities, kinds["a-01"].architecture) == (
        "retrieval",
        "image",
        "vit tiny",
    )
    assert (kinds["odd"].task, kinds["odd"].architecture) == ("retrieval", "")
    assert (kinds["b-0"].task, kinds["b-0"].modalities) == ("classification", "")


@pytest.mark.parametrize(
    "config", [{"run": 3}, {"run": {"rounds": "many"}}, {"clients": [1]}, {"name": [1], "algorithm": 4}]
)
def test_odd_configurations_do_not_hinder_the_page(full, config):
    (full / "config.yaml").write_text(yaml.safe_dump(config))
    assert page_of(full).parts == ALL_PARTS


# ---- charts


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6))
def test_marks_enclose_the_values_with_few_steps(low, span):
    marks = round_marks(low, low + span)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= low + span - 1e-6 * step
    assert 2 <= len(marks) <= 6
    assert np.diff(marks) == pytest.approx(step)


@given(first=st.integers(0, 3000), rounds=st.integers(1, 5000))
def test_round_marks_are_whole_and_inside(first, rounds):
    marks = whole_marks(first - 0.5, first + rounds - 0.5)
    assert 1 <= len(marks) <= 9 or rounds == 1
    assert all(first <= mark < first + rounds for mark in marks)


@given(st.dictionaries(st.integers(0, 99), st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_every_value_lies_within_the_axes(values):
    axes = axes_of(values, values.values())
    for number, value in values.items():
        assert 48 <= axes.across(number) <= 390
        assert 26 <= axes.up(value) <= 207


def test_lines_leave_out_what_is_not_finite():
    line = Line("a", {1: 1.0, 2: math.nan, 3: math.inf, 4: 2.0}, ("a",))
    page = Page(line_chart("t", "u", [line], [Key("a")]))
    assert page.charts[0]["lines"][0]["values"] == [1.0, 2.0]
    assert line_chart("t", "u", [Line("a", {1: math.nan}, ())], []) == ""
    assert stacked_chart("t", "u", [Line("a", {1: 0.0}, ())]) == ""


def test_stacked_bars_stand_on_each_other():
    parts = [Line("a", {1: 2.0, 2: 4.0}, ()), Line("b", {1: 1.0, 3: 3.0}, ())]
    drawn = [each["d"] for each in Page(stacked_chart("t", "u", parts)).of("path") if "V" in (each["d"] or "")]
    (a, b) = ([(float(y), float(v)) for y, v in re.findall(r"M\S+ (\S+?)h[^V]*V([^h]*)h", path)] for path in drawn)
    assert b[0][0] == a[0][1]  # begins where the one below ends
    assert a[0][0] == a[1][0] == b[1][0]  # the others on the ground
    assert (a[0][0] - a[0][1]) == pytest.approx(2 * (b[0][0] - b[0][1]), abs=0.3)


@pytest.mark.parametrize(("carry", "means"), [(True, [10.0, 20.0, 25.0]), (False, [10.0, 30.0, 20.0])])
def test_spread_over_clients(carry, means):
    series = {"a": {1: 10.0, 3: 20.0}, "b": {2: 30.0}}
    chart = Page(spread_chart("t", "u", series, 1, carry=carry)).charts[0]
    assert next(line["values"] for line in chart["lines"] if line["label"] == "mean") == means


def test_many_clients_have_no_line_of_their_own():
    def labels(number):
        series = {f"c{n}": {1: float(n), 2: 5.0} for n in range(number)}
        return [line["label"] for line in Page(spread_chart("t", "u", series, 1)).charts[0]["lines"]]

    assert labels(20) == [*(f"c{n}" for n in range(20)), "mean"]
    assert labels(21) == ["lowest", "highest", "mean"]


def test_long_runs_have_thinned_tables():
    page = Page(line_chart("t", "u", [Line("a", {n: float(n) for n in range(1, 1002)}, ("a",))], []))
    assert "every 6 rounds" in page.text
    assert len(page.of("tr")) < 180
    assert len(page.charts[0]["x"]) == 1001


# ---- heat maps


def levels_of(attributes, number):
    frame = json.loads(attributes["data-heat"])["frames"][str(number)]
    return frame["rows"], np.frombuffer(base64.b64decode(frame["levels"]), np.uint8)


def test_heat_maps_show_levels_of_one_scale():
    frames = {1: Frame(["a", "b"], np.array([[0.0, 1.0], [math.nan, 0.5]])), 4: Frame(["c"], np.array([[2.0, 1.0]]))}
    page = Page(HeatMap("t", frames, "sample", ["x", "y"]).drawn())
    (figure,) = page.of("figure")
    assert levels_of(figure, 1)[1].tolist() == [0, 127, 255, 64]
    assert levels_of(figure, 4) == (["c"], pytest.approx(np.array([254, 127])))
    source = page.of("img")[0]["src"]
    with Image.open(io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,")))) as image:
        assert image.size == (2, 1)
        assert image.convert("RGBA").getpixel((0, 0)) == (*palette_bytes()[3 * 254 : 3 * 254 + 3], 255)


def test_cells_without_a_value_are_transparent():
    page = Page(HeatMap("t", {1: Frame(["a"], np.array([[math.nan, 1.0]]))}, "sample", ["x", "y"]).drawn())
    with Image.open(io.BytesIO(base64.b64decode(page.of("img")[0]["src"].split(",")[1]))) as image:
        assert [image.convert("RGBA").getpixel((x, 0))[3] for x in (0, 1)] == [0, 255]


def write_array(folder, number, values, clients):
    path = folder / "arrays" / "weights"
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {"values": torch.tensor(values)}, path / f"round-{number:04d}.safetensors", {"clients": json.dumps(clients)}
    )


def test_weights_are_averaged_over_columns_and_absent_clients_are_empty(tmp_path):
    values = np.arange(2 * 450, dtype=np.float64).reshape(2, 450)
    write_array(tmp_path, 1, values, ["b", "a"])
    write_array(tmp_path, 2, values[:1], ["b"])
    (figure, _) = Page(weights(RunRecords.load(tmp_path))).of("figure")
    data = json.loads(figure["data-heat"])
    rows, levels = levels_of(figure, 1)
    assert rows == ["a", "b"]
    assert data["columns"][:2] == ["0 to 2", "3 to 5"]
    means = values[[1, 0]].reshape(2, 150, 3).mean(2)
    assert (data["low"], data["high"]) == (means.min(), means.max())
    restored = data["low"] + (data["high"] - data["low"]) * levels.reshape(2, 150) / 254
    assert np.abs(restored - means).max() <= (means.max() - means.min()) / 508 + 1e-9
    assert levels_of(figure, 2)[1].reshape(2, 150)[0].tolist() == [255] * 150


def test_maps_of_many_clients_show_each_rounds_cohort(tmp_path):
    names = [f"c{n:02d}" for n in range(60)]
    for number in (1, 2):
        cohort = names[number::6]
        write_array(tmp_path, number, np.random.default_rng(0).random((len(cohort), 4)), cohort)
        write_array(tmp_path, 3, np.ones((60, 4)), names)
    (figure, _) = Page(weights(RunRecords.load(tmp_path))).of("figure")
    assert levels_of(figure, 1)[0] == names[1::6]
    assert levels_of(figure, 3)[0] == names


def test_damaged_arrays_are_an_error(full):
    (full / "arrays" / "weights.image" / "round-0001.safetensors").write_bytes(b"x")
    with pytest.raises(RunError, match="damaged"):
        html_report(RunRecords.load(full))


# ---- markup, sizes, colours


def test_markup_escapes_all_but_markup():
    assert tag("p", "<b>", Markup("<b></b>"), 3, None, ["&"], class_='"x"', data_a=True, id=None) == (
        '<p class="&quot;x&quot;" data-a>&lt;b&gt;<b></b>3&amp;</p>'
    )
    assert tag("img", alt="") == '<img alt="">'
    assert escaped("a\x00\x1b\u202eb\ud800") == "a\ufffd\ufffd\ufffdb?"


@given(st.text())
def test_what_is_escaped_is_read_back(text):
    page = Page(tag("p", text, title=text))
    shown = "".join(page.texts)
    assert Counter(page.of("p")[0]["title"]) == Counter(shown)
    assert len(page.elements) == 1
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**50, "3,072.0 TiB")],
)
def test_sizes(number, text):
    assert size(number) == text


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_the_contrast_that_readers_need(scheme):
    style = resources.files("polyfed.reporting.html").joinpath("style.css").read_text("utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    colours = light if scheme == "light" else light | dark
    for ground in ("page", "surface", "raised"):
        for text in ("ink", "muted", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mood in ("good", "bad", "odd"):
        assert contrast(colours[f"{mood}-ink"], colours[mood]) >= 4.5
    for number in range(8):
        assert contrast(colours[f"c{number}"], colours["surface"]) >= 3.0, number


def test_a_single_round_is_drawn(tmp_path):
    page = page_of(write_run(tmp_path / "short", rounds=1))
    assert {"server", "curves", "traffic", "weights"} <= set(page.parts)
    assert all(len(chart["x"]) == 1 for chart in page.charts[:-1])  # the last is that of the weights
    assert page.of("circle")
