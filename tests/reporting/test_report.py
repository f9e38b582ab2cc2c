from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from polyfed.reporting.metrics import ClientSpread, client_spreads, lower_is_better
from polyfed.reporting.page import write_report
from polyfed.reporting.run_tables import clients_table, tables
from polyfed.runs.records import RunRecords
from run_folders import write_lines, write_measured


@pytest.fixture(scope="module")
def records(made_up_run: Path) -> RunRecords:
    return RunRecords.load(made_up_run)


@pytest.fixture(scope="module")
def by_title(records):
    return {table.title: table for table in tables(records)}


def client_rows(records: RunRecords) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in clients_table(records, "test").rows}


# ---- the spread over clients


@pytest.mark.parametrize(
    ("metric", "values", "figures"),
    [
        ("accuracy", {"a": 70.0, "b": 40.0, "c": 40.0, "d": 90.0}, (60.0, 40.0, "b", 90.0, 50.0, math.sqrt(450))),
        ("loss", {"a": 0.5, "b": 2.0}, (1.25, 2.0, "b", 0.5, 1.5, 0.75)),  # the highest is the worst
        ("accuracy", {"a": 3.0}, (3.0, 3.0, "a", 3.0, 0.0, 0.0)),
        ("accuracy", {}, (math.nan, math.nan, "", math.nan, math.nan, math.nan)),
    ],
)
def test_figures_are_those_of_the_definition(metric, values, figures):
    spread = ClientSpread("g", metric, values, 5).to_json()
    names = ("mean", "worst", "worst_client", "best", "disparity", "std")
    assert spread == pytest.approx({"clients": len(values), **dict(zip(names, figures, strict=True))}, nan_ok=True)


def test_only_a_loss_is_better_if_lower():
    assert [lower_is_better(name) for name in ("loss", "test_loss", "lossless", "r1_sum")] == [True, True, False, False]


# ---- tables


def test_recalls_stand_with_gallery_and_chance(records, by_title):
    table = by_title["Server, test: retrieval"]
    row = dict(zip(table.columns, next(r for r in table.rows if r[0] == "image to text R@5"), strict=True))
    value = records.last("server")["image_to_text_r@5"]
    best = records.best("server", "image_to_text_r@5")
    assert row == {
        "recall": "image to text R@5",
        "final": f"{value:.2f}",
        "best": f"{best[1]:.2f}",
        "(round)": str(best[0]),
        "chance": "4.920",
        "final / chance": f"{value / 4.9202:.1f}",
        "gallery": "500",
        "folds": "1",
        "positives": "5",
    }


def test_clients_are_summed_up_by_group(records):
    rows = client_rows(records)
    spread = next(each for each in client_spreads(records) if (each.group, each.metric) == ("image", "accuracy"))
    shown = [f"{value:.2f}" for value in (spread.mean, spread.worst, spread.best, spread.disparity, spread.std)]
    assert rows["image: accuracy"] == ("4 of 4", *shown[:2], spread.worst_client, *shown[2:], "-")
    assert "paired: r1_sum" in rows
    assert "image: n" not in rows
    assert "image: Measured with n 50." in clients_table(records, "test").notes


def test_clients_without_a_finite_value_are_counted_as_missing(tmp_path):
    write_measured(tmp_path, {"a": {"loss": math.nan, "accuracy": 5.0}, "b": {"loss": 2.0, "accuracy": 5.0}})
    rows = client_rows(RunRecords.load(tmp_path))
    assert rows["clients: loss"] == ("1 of 2", "2.00", "2.00", "b", "2.00", "-", "-", "-")
    assert rows["clients: accuracy"] == ("2 of 2", "5.00", "5.00", "a", "5.00", "0.00", "0.00", "-")


def test_what_clients_were_measured_with_has_a_range_where_they_differ(tmp_path):
    sizes = {"a": 20.0, "b": 40.0}
    write_measured(tmp_path, {c: {"gallery_text": size, "folds": 1.0, "r1_sum": 9.0} for c, size in sizes.items()})
    notes = clients_table(RunRecords.load(tmp_path), "test").notes
    assert "clients: Measured with gallery_text 30 (20 to 40), folds 1." in notes


def test_sites_that_are_groups_of_their_own_are_summed_up_together(tmp_path):
    write_measured(tmp_path, {"north": {"accuracy": 40.0}, "south": {"accuracy": 70.0}})
    held = {"items": 3, "samples": 3, "labels": None, "source": "own", "split": "train"}
    (tmp_path / "partition.json").write_text(json.dumps({name: held | {"group": name} for name in ("north", "south")}))
    rows = client_rows(RunRecords.load(tmp_path))
    assert rows["all clients: accuracy"] == ("2 of 2", "55.00", "40.00", "north", "70.00", "30.00", "15.00", "-")


def test_traffic_and_exclusions(by_title):
    assert by_title["Communication"].notes[-1] == "Replies: 0 clipped, 2 excluded."
    assert by_title["Communication"].rows[-1] == ("both", f"{12 * 9 * 4_500_200:,}", "463.51", "38.63")
    assert by_title["Excluded clients"].rows == [("text-1", "2", "5", "no answer in 60 s")]


def test_exclusions_are_grouped_by_cause_where_the_run_told_it(tmp_path):
    event = {"kind": "event", "event": "client_excluded"}
    causes = [("b", "late"), ("a", "failed"), ("b", "late"), ("b", "lost"), ("a", "")]
    lines = [
        event | {"round": k, "participant": client, "reason": f"why {k}"} | ({"cause": cause} if cause else {})
        for k, (client, cause) in enumerate(causes, start=1)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    records = RunRecords.load(tmp_path)
    (table,) = (one for one in tables(records) if one.title == "Excluded clients")
    assert table.rows == [
        ("a", "-", "1", "5", "why 5"),
        ("a", "failed", "1", "2", "why 2"),
        ("b", "late", "2", "3", "why 3"),
        ("b", "lost", "1", "4", "why 4"),
    ]
    assert list(records.frame("events").cause) == [cause for _, cause in causes]


# ---- files


def test_the_files_say_all_that_the_tables_say(run_folder):
    records = RunRecords.load(run_folder)
    path = write_report(records)
    assert path == run_folder / "report.md"
    markdown = path.read_text()
    assert markdown.startswith("# run: 12 rounds in 2:0")
    assert all(cell in markdown for table in tables(records) for row in table.rows for cell in row)
    spreads = json.loads((run_folder / "client_spread.json").read_text())
    assert set(spreads) == {"test"}
    assert spreads["test"]["image"]["accuracy"]["clients"] == 4
    for spread in client_spreads(records):
        assert spreads["test"][spread.group][spread.metric] == pytest.approx(spread.to_json())


def test_a_metric_without_finite_values_is_null_for_scripts(tmp_path):
    write_measured(tmp_path, {"a": {"loss": math.nan, "accuracy": 5.0}})
    write_report(RunRecords.load(tmp_path))
    spreads = json.loads((tmp_path / "client_spread.json").read_text())["test"]["clients"]
    nothing = dict.fromkeys(("mean", "worst", "best", "disparity", "std"))
    assert spreads["loss"] == nothing | {"clients": 0, "worst_client": ""}
    assert spreads["accuracy"]["worst"] == 5.0


def test_an_empty_run_has_a_report(tmp_path):
    records = RunRecords.load(tmp_path)
    assert tables(records) == []
    assert "0 rounds, 0 clients" in write_report(records).read_text()


def test_warnings_are_shown(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round')
    assert "**Warning**: metrics.jsonl" in write_report(RunRecords.load(tmp_path)).read_text()
