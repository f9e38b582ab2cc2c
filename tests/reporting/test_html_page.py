"""The HTML report: its parts and their content, with data missing, damaged, hostile or many."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from html_pages import ALL_PARTS, MENU, Page, complete, page_of

from polyfed.core.errors import RunError
from polyfed.reporting.charts import FigureSheet
from polyfed.reporting.page import html_report, write_html_report
from polyfed.reporting.run_figures import recorded_charts, run_figures
from polyfed.reporting.run_tables import client_descriptions
from polyfed.reporting.summary import RunSummary
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_measured

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;]]>"


@pytest.fixture(scope="module")
def records(made_up_run: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """Records of a run with all content of a page; not to be changed."""
    folder = tmp_path_factory.mktemp("complete") / "run"
    return RunRecords.load(complete(Path(shutil.copytree(made_up_run, folder))))


@pytest.fixture(scope="module")
def text(records: RunRecords) -> str:
    return html_report(records)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture
def folder(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same run, to be changed; its page has frames without figures, which take longer than all the rest."""
    monkeypatch.setattr(FigureSheet, "svgs", ["<svg></svg>"])
    return complete(run_folder)


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change every line of a log; those of which the result is false are left out."""
    write_lines(path, [line for line in [json.loads(line) for line in path.read_text().splitlines()] if change(line)])


# ---- parts


def test_a_full_run_has_every_part(page):
    assert page.parts == ALL_PARTS
    assert [link["href"] for link in page.of("a")] == [f"#{part}" for part in ("next", *MENU)]
    for shown in ("my run", "What it is for.", "creamfl", "12 of 12", "complete", "cpu", "Ties count against"):
        assert shown in page.text
    assert "stopped" not in page.text


@pytest.mark.slow
def test_the_file_is_written_where_asked_and_is_the_same_each_time(records, text, tmp_path):
    path = write_html_report(records, tmp_path / "new" / "page.html")
    assert path == tmp_path / "new" / "page.html"
    assert path.read_text() == text
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]


def test_nothing_is_loaded_from_anywhere(records, text, page):
    for name, attributes in page.elements:
        assert name not in {"link", "iframe", "object", "embed", "base", "form", "video", "audio", "source"}
        for key in ("src", "href", "action", "xlink:href", "srcset", "poster", "data"):
            assert (attributes.get(key) or "#").startswith(("#", "data:image/png;base64,"))
        assert not any(key.startswith("on") for key in attributes)
        assert "url(" not in (attributes.get("style") or "").replace("url(#", "")  # a hatch is in the figure itself
    assert page.of("script") == []
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = (each["content"] for each in page.of("meta") if "http-equiv" in each)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:;")
    assert str(records.folder) not in text


def test_text_of_the_run_is_escaped_everywhere(tmp_path):
    holding = {"group": HOSTILE, "source": HOSTILE, "split": HOSTILE, "items": 3, "samples": 3, "labels": {HOSTILE: 3}}
    (tmp_path / "partition.json").write_text(json.dumps({HOSTILE: holding}))
    clients = {HOSTILE: {"task": HOSTILE, "models": [{"encoders": {HOSTILE: HOSTILE}}]}}
    settings = dict.fromkeys(("name", "description", "algorithm"), HOSTILE) | {"run": {"rounds": 2}, "clients": clients}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "environment.json").write_text(json.dumps({"device": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    names = HOSTILE, f"{HOSTILE}_to_b_r@1", "accuracy"
    lines = [
        {"round": number, "participant": participant, "kind": source, "metrics": dict.fromkeys(names, 1.0 * number)}
        for number, participant, source in product((1, 2, 3), ("server", HOSTILE), ("test", "train"))
    ]
    event = {"round": 1, "participant": HOSTILE, "kind": "event", "event": HOSTILE, "reason": HOSTILE}
    write_lines(tmp_path / "metrics.jsonl", [*lines, *[event] * 9, event | {"event": "client_excluded"}])
    sent = {"round": 2, "client": HOSTILE, "direction": "up", "bytes": 9}
    write_lines(tmp_path / "ledger.jsonl", [sent | dict.fromkeys(("step", "bundle", "kind", "dtype"), HOSTILE)])
    page = page_of(tmp_path)
    assert page.parts == ALL_PARTS
    assert page.of("script") == page.of("img") == []
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert page.text.count(HOSTILE) > 20


# ---- what is missing or damaged


def test_a_killed_run_is_marked(folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"run": {"rounds": 40}}))
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-20])
    page = page_of(folder)
    assert "stopped after round 12 of 40" in page.text
    assert "Warning: metrics.jsonl: the last line is cut off" in page.text


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_logs_cut_anywhere_are_shown_as_far_as_they_go(folder, share):
    for name in ("metrics", "ledger", "timing"):
        path = folder / f"{name}.jsonl"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    page = page_of(folder)
    assert {"partition", "clients", "configuration"} <= set(page.parts)
    assert ("traffic" in page.parts) == (share > 0.0)


def test_an_empty_folder_has_a_page_without_parts(tmp_path):
    page = page_of(tmp_path)
    assert page.parts == ["facts", "reading"]
    assert "0 rounds" in page.text


MISSING = {
    "metrics.jsonl": {"gain", "next", "server", "curves", "inner", "events"},
    "partition.json": {"partition"},
    "config.yaml": {"next", "configuration"},
    "ledger.jsonl": {"traffic"},
    "environment.json": set(),
}


@pytest.mark.parametrize("name", MISSING)
def test_parts_without_data_are_left_out(folder, name):
    (folder / name).rename(folder.parent / name)
    page = page_of(folder)
    assert set(page.parts) == set(ALL_PARTS) - MISSING[name]
    assert ("bytes up" in page.text) == (name != "ledger.jsonl")


def test_a_run_without_server_model_shows_its_clients(folder):
    changed(folder / "metrics.jsonl", lambda line: line["participant"] != "server")
    page = page_of(folder)
    assert set(page.parts) == set(ALL_PARTS) - {"server", "inner"}
    assert "server: sum" not in page.text
    assert "image, mean of 4: accuracy" in page.text


@pytest.mark.parametrize(("content", "message"), [("{", "is damaged"), ("[1]", "is damaged: it holds a list")])
def test_damage_is_an_error_that_names_the_file(folder, content, message):
    (folder / "environment.json").write_text(content)
    with pytest.raises(RunError, match=rf"environment\.json {message}"):
        html_report(RunRecords.load(folder))


def test_odd_configurations_do_not_hinder_the_page(folder):
    for config in ({"run": 3, "clients": [1]}, {"run": {"rounds": "many"}, "name": [1], "algorithm": 4}):
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        assert {*page_of(folder).parts} == {*ALL_PARTS} - {"next"}


# ---- few and many


@pytest.mark.slow
def test_a_thousand_clients_fit(tmp_path):
    draw = random.Random(0)
    groups = {"image": 600, "text": 300, "paired": 100}
    clients = {f"{group}-{n:03d}": group for group, number in groups.items() for n in range(number)}
    base = {"source": "s", "split": "t", "items": 400, "samples": 400}
    labels = {f"class {c}": draw.randint(1, 9) for c in range(100)}
    holdings = {c: base | {"group": g, "labels": None if g == "paired" else labels} for c, g in clients.items()}
    (tmp_path / "partition.json").write_text(json.dumps(holdings))
    metrics, ledger = [], []
    for number in range(1, 4):
        for client in clients:
            entry = {"round": number, "participant": client}
            metrics.append(entry | {"kind": "test", "metrics": {"accuracy": draw.random(), "loss": 1.0}})
            if draw.random() < 0.8:
                metrics.append(entry | {"kind": "event", "event": "client_excluded", "reason": "late"})
            line = {"round": number, "client": client, "direction": "up", "step": "fit", "bundle": "w"}
            ledger.append(line | {"kind": "weights", "dtype": "float32", "bytes": 1000})
    write_lines(tmp_path / "metrics.jsonl", metrics)
    write_lines(tmp_path / "ledger.jsonl", ledger)
    text = html_report(RunRecords.load(tmp_path))
    assert len(text.encode()) < 4_000_000
    page = Page(text)
    assert {"curves", "partition", "traffic", "clients", "events"} <= set(page.parts)
    assert "the last 2,000 of" in page.text


# ---- content


def test_the_page_opens_with_a_sentence_a_chart_and_a_table_of_the_same_figures(records, page):
    value, summary = records.metrics("server")["r1_sum"] / 2, RunSummary(records)
    first = f"the server puts the right match first in {value:.1f} % of searches, against 1.0 % by guessing"
    assert first in page.text[: page.text.index("Facts")]
    assert f"server, federation: {value:.1f}" in page.titles
    assert ("server: mean R@1", f"{value:.2f}", "1.00", "100") in summary.results_table.rows
    assert "sent 463.5 MiB (up 154.5 MiB, down 309.0 MiB)" in page.text
    assert "0 clipped, 2 excluded" in page.text
    assert "clients 9 (4 image, 3 text, 2 paired)" in page.text


def test_curves_hold_the_recorded_values(records, page):
    for split in ("test", "validation"):
        series = records.series("server", "r1_sum", split)
        assert page.series[f"r1_sum {split}"] == pytest.approx(list(series.values()), abs=0.006)
    sent = [each / 2**20 for each in records.bytes_per_round("up").values()]
    assert page.series["clients to server"] == pytest.approx(sent, rel=1e-3)


def test_the_table_of_clients(records, text):
    table = text[text.index('<section id="clients"') :]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", table[: table.index("</table>")])
    assert [name for name, _ in rows] == list(records.clients)
    columns = re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table[: table.index("</thead>")])
    cells = {name: dict(zip(columns[1:], re.findall(r"<td[^>]*>(.*?)</td>", row), strict=True)) for name, row in rows}
    assert cells["text-1"]["excluded"] == "2"
    assert cells["text-1"]["last reason"] == "round 5: no answer in 60 s"
    assert cells["image-0"]["accuracy"] == f"{records.last('image-0')['accuracy']:.2f}"
    assert cells["paired-0"]["accuracy"] == "-"
    assert cells["image-0"]["bytes up"] == "17.2 MiB"
    assert cells["image-0"]["rounds"] == "12"


def test_constant_values_and_two_rounds_have_no_chart(tmp_path):
    constant = {"teacher.gallery": 0.0, "teacher.norm": 3.0, "digest.items": 9.0}
    write_measured(tmp_path, {"server": constant}, 1, 2, kind="train")
    assert recorded_charts(RunRecords.load(tmp_path)) == []
    line = {"participant": "server", "kind": "train"}
    lines = [line | {"round": k, "metrics": {"teacher.gallery": 0.0, "teacher.norm": 4.0 * k}} for k in (1, 2, 3)]
    write_lines(tmp_path / "metrics.jsonl", lines[:2])
    assert "recorded" not in run_figures(RunRecords.load(tmp_path))
    write_lines(tmp_path / "metrics.jsonl", lines)
    (chart,) = recorded_charts(RunRecords.load(tmp_path))
    assert [line.label for line in chart.lines] == ["norm"]
    assert "recorded" in run_figures(RunRecords.load(tmp_path))


def test_kinds_of_clients_come_from_the_configuration(tmp_path):
    image, text = {"name": "resnet", "size": "tiny", "widths": [8, 16]}, {"name": "gru", "width": 64}
    models = [{"encoders": {"image": image, "text": text}}, {"encoders": {"image": {"name": "vit", "size": "tiny"}}}]
    clients = {"a": {"task": {"name": "retrieval"}, "models": models}, "b": {"task": "classification", "models": []}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"clients": clients}))
    holding = {"source": "s", "split": "t", "items": 1, "samples": 1}
    groups = {"a-00": "a", "a-01": "a", "a-02": "a", "odd": "a", "b-0": "b"}
    held = {name: holding | {"group": group} for name, group in groups.items()}
    (tmp_path / "partition.json").write_text(json.dumps(held))
    kinds = client_descriptions(RunRecords.load(tmp_path))
    two = {"task": "retrieval", "modalities": "image, text", "architecture": "resnet 8-16 + gru 64"}
    vit = {"task": "retrieval", "modalities": "image", "architecture": "vit tiny"}
    others = {"odd": {"task": "retrieval"}, "b-0": {"task": "classification"}}
    assert kinds == {"a-00": two, "a-01": vit, "a-02": two} | others


def test_without_figures_the_tables_stay_with_a_note(records, page):
    plain = Page(html_report(records, figures={}))
    assert plain.of("svg") == []
    assert "since run.output.plots is false" in plain.text
    assert "since run.output.plots is false" not in page.text
    assert {"server", "partition", "clients"} <= set(plain.parts)
