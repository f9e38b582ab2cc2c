from __future__ import annotations

import json

import pytest

from polyfed.reporting.report import clients_table, tables, write_report
from polyfed.runs.records import RunRecords
from run_folders import write_lines


@pytest.fixture
def records(run_folder):
    return RunRecords.load(run_folder)


def by_title(records):
    return {table.title: table for table in tables(records)}


def test_recalls_stand_with_gallery_and_chance(records):
    table = by_title(records)["Server, test: retrieval"]
    row = dict(zip(table.columns, next(r for r in table.rows if r[0] == "image to text R@5"), strict=True))
    value = records.last("server")["image_to_text_r@5"]
    best = records.best("server", "image_to_text_r@5")
    assert row["final"] == f"{value:.2f}"
    assert (row["best"], row["(round)"]) == (f"{best[1]:.2f}", str(best[0]))
    assert (row["gallery"], row["positives"], row["folds"]) == ("500", "5", "1")
    assert row["chance"] == "4.920"
    assert row["final / chance"] == f"{value / 4.9202:.1f}"


def test_clients_are_summed_up_by_group(records):
    table = clients_table(records, "test")
    rows = {row[0]: row[1:] for row in table.rows}
    values = [records.last(client)["accuracy"] for client in records.groups["image"]]
    mean = sum(values) / 4
    low, high = min(values), max(values)
    worst = records.groups["image"][values.index(low)]
    std = (sum((value - mean) ** 2 for value in values) / 4) ** 0.5
    shown = [f"{value:.2f}" for value in (mean, low, high, high - low, std)]
    assert rows["image: accuracy"] == ("4 of 4", *shown[:2], worst, *shown[2:])
    assert "paired: r1_sum" in rows
    assert "image: n" not in rows
    assert "image: Measured with n 50." in table.notes


def test_clients_without_a_finite_value_are_counted_as_missing(tmp_path):
    lines = [
        {"round": 1, "participant": participant, "kind": "test", "metrics": {"loss": value, "accuracy": 5.0}}
        for participant, value in (("a", float("nan")), ("b", 2.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    rows = {row[0]: row[1:] for row in clients_table(RunRecords.load(tmp_path), "test").rows}
    assert rows["clients: loss"] == ("1 of 2", "2.00", "2.00", "b", "2.00", "0.00", "0.00")
    assert rows["clients: accuracy"] == ("2 of 2", "5.00", "5.00", "a", "5.00", "0.00", "0.00")


def test_the_report_leaves_the_clients_spread_for_scripts(records):
    write_report(records)
    found = json.loads((records.folder / "client_spread.json").read_text())["test"]["image"]["accuracy"]
    values = {client: records.last(client)["accuracy"] for client in records.groups["image"]}
    assert found["worst"] == min(values.values()) == values[found["worst_client"]]
    assert found["disparity"] == pytest.approx(max(values.values()) - min(values.values()))
    assert found["clients"] == 4


def test_a_metric_without_finite_values_is_null_for_scripts(tmp_path):
    line = {"round": 1, "participant": "a", "kind": "test", "metrics": {"loss": float("nan"), "accuracy": 5.0}}
    write_lines(tmp_path / "metrics.jsonl", [line])
    write_report(RunRecords.load(tmp_path))
    found = json.loads((tmp_path / "client_spread.json").read_text())["test"]["clients"]
    assert found["loss"] == dict.fromkeys(("mean", "worst", "best", "disparity", "std")) | {
        "clients": 0, "worst_client": "",
    }  # fmt: skip
    assert found["accuracy"]["worst"] == 5.0


def test_traffic_and_exclusions(records):
    found = by_title(records)
    assert found["Communication"].rows[-1] == ("both", f"{12 * 9 * 4_500_200:,}", "463.51", "38.63")
    assert found["Excluded clients"].rows == [("text-1", "2", "5", "no answer in 60 s")]


def test_the_file_says_all_that_the_tables_say(records):
    path = write_report(records)
    assert path == records.folder / "report.md"
    markdown = path.read_text()
    assert markdown.startswith("# run: 12 rounds in 2:0")
    assert all(cell in markdown for table in tables(records) for row in table.rows for cell in row)


def test_an_empty_run_has_a_report(tmp_path):
    records = RunRecords.load(tmp_path)
    assert tables(records) == []
    assert "0 rounds, 0 clients" in write_report(records).read_text()


def test_warnings_are_shown(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round')
    assert "**Warning**: metrics.jsonl" in write_report(RunRecords.load(tmp_path)).read_text()


def test_what_clients_were_measured_with_has_a_range_where_they_differ(tmp_path):
    lines = [
        {
            "round": 1,
            "participant": participant,
            "kind": "test",
            "metrics": {"gallery_text": size, "folds": 1.0, "r1_sum": 9.0},
        }
        for participant, size in (("a", 20.0), ("b", 40.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    notes = clients_table(RunRecords.load(tmp_path), "test").notes
    assert "clients: Measured with gallery_text 30 (20 to 40), folds 1." in notes


def test_sites_that_are_groups_of_their_own_are_summed_up_together(tmp_path):
    lines = [
        {"round": 1, "participant": name, "kind": "test", "metrics": {"accuracy": value}}
        for name, value in (("north", 40.0), ("south", 70.0))
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    held = {
        name: {"group": name, "items": 3, "samples": 3, "labels": None, "source": "own", "split": "train"}
        for name in ("north", "south")
    }
    (tmp_path / "partition.json").write_text(json.dumps(held))
    rows = {row[0]: row[1:] for row in clients_table(RunRecords.load(tmp_path), "test").rows}
    assert rows["all clients: accuracy"] == ("2 of 2", "55.00", "40.00", "north", "70.00", "30.00", "15.00")
