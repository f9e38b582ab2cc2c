"""What the HTML report says of a run and its clients."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from html_pages import ALL_PARTS, page_of, write_full

from polyfed.reporting.html.facts import client_kinds
from polyfed.reporting.html.page import html_report
from polyfed.runs.records import RunRecords
from run_folders import write_lines


@pytest.fixture
def full(run_folder):
    return write_full(run_folder)


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
    evaluated = {"round": 4, "client": "text-1", "direction": "up", "step": "evaluate:assess", "bundle": "framing"}
    write_lines(full / "ledger.jsonl", [*silent, evaluated | {"kind": "framing", "dtype": "", "bytes": 9}])
    text = page_of(full).text
    assert "7 text-1 client returned first answer after its exclusion in round 5" in text
    assert text.count("first answer after its exclusion") == 1


def test_recorded_returns_are_not_shown_twice(full):
    event = {
        "round": 3,
        "participant": "text-1",
        "kind": "event",
        "event": "client_returned",
        "reason": "answered 'fit'",
    }
    with (full / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps(event) + "\n")
    text = page_of(full).text
    assert "3 text-1 client returned answered 'fit'" in text
    assert "exclusion in round 3" not in text
    assert "6 text-1 client returned first answer after its exclusion in round 5" in text


@pytest.mark.parametrize("clients", [3, 12, 30])
def test_what_a_method_recorded_of_each_client_is_shown_of_few_and_of_many(tmp_path, clients):
    metrics = {f"weight.h-{k}": (k + 1) / 100 for k in range(clients)}
    lines = [{"round": n, "participant": "server", "kind": "train", "metrics": metrics} for n in (1, 2)]
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
    line = {"round": 1, "participant": "server", "kind": "validation", "metrics": {"accuracy": 60.0, "classes": 8.0}}
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
