"""Tables of a run: the report, the teacher, and who holds what."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyfed.reporting import run_tables
from polyfed.reporting.metrics import ClientSpread, client_spreads, lower_is_better
from polyfed.reporting.page import html_report, write_report
from polyfed.reporting.run_figures import partition_sheet, run_figures
from polyfed.runs.opened import open_run
from polyfed.runs.records import PartitionEntry, RunRecords
from run_folders import write_lines, write_measured, write_run


@pytest.fixture(scope="module")
def records(made_up_run: Path) -> RunRecords:
    return RunRecords.load(made_up_run)


@pytest.fixture(scope="module")
def by_title(records):
    return {table.title: table for table in run_tables.tables(records)}


def client_rows(records: RunRecords) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in run_tables.clients_table(records, "test").rows}


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
    value, last = (metrics["image_to_text_r@5"] for metrics in (records.metrics("server"), records.last("server")))
    assert table.notes[0] == f"Value: {records.chosen}. Last: after the last round."
    chance = {"chance": "4.920", "value / chance": f"{value / 4.9202:.1f}"}
    context = {"gallery": "500", "folds": "1", "positives": "5"}
    assert row == {"recall": "image to text R@5", "value": f"{value:.2f}", "last": f"{last:.2f}"} | chance | context


def test_clients_are_summed_up_by_group(records):
    rows = client_rows(records)
    spread = next(each for each in client_spreads(records) if (each.group, each.metric) == ("image", "accuracy"))
    shown = [f"{value:.2f}" for value in (spread.mean, spread.worst, spread.best, spread.disparity, spread.std)]
    assert rows["image: accuracy"] == ("4 of 4", *shown[:2], spread.worst_client, *shown[2:], "-")
    assert "paired: r1_sum" in rows
    assert "image: n" not in rows
    assert "image: Measured with n 50." in run_tables.clients_table(records, "test").notes


def test_clients_without_a_finite_value_are_counted_as_missing(tmp_path):
    write_measured(tmp_path, {"a": {"loss": math.nan, "accuracy": 5.0}, "b": {"loss": 2.0, "accuracy": 5.0}})
    rows = client_rows(RunRecords.load(tmp_path))
    assert rows["clients: loss"] == ("1 of 2", "2.00", "2.00", "b", "2.00", "-", "-", "-")
    assert rows["clients: accuracy"] == ("2 of 2", "5.00", "5.00", "a", "5.00", "0.00", "0.00", "-")


def test_what_clients_were_measured_with_has_a_range_where_they_differ(tmp_path):
    sizes = {"a": 20.0, "b": 40.0}
    write_measured(tmp_path, {c: {"gallery_text": size, "folds": 1.0, "r1_sum": 9.0} for c, size in sizes.items()})
    notes = run_tables.clients_table(RunRecords.load(tmp_path), "test").notes
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


def test_exclusions_are_grouped_by_recorded_cause(tmp_path):
    event = {"kind": "event", "event": "client_excluded"}
    causes = [("b", "late"), ("a", "failed"), ("b", "late"), ("b", "lost"), ("a", "")]
    lines = [
        event | {"round": k, "participant": client, "reason": f"why {k}"} | ({"cause": cause} if cause else {})
        for k, (client, cause) in enumerate(causes, start=1)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    records = RunRecords.load(tmp_path)
    (table,) = (one for one in run_tables.tables(records) if one.title == "Excluded clients")
    assert table.rows == [
        ("a", "-", "1", "5", "why 5"),
        ("a", "failed", "1", "2", "why 2"),
        ("b", "late", "2", "3", "why 3"),
        ("b", "lost", "1", "4", "why 4"),
    ]
    assert list(records.frame("events").cause) == [cause for _, cause in causes]


# ---- files


def test_the_files_contain_all_tables(run_folder):
    records = RunRecords.load(run_folder)
    path = write_report(records)
    assert path == run_folder / "report.md"
    markdown = path.read_text()
    assert markdown.startswith("# run: 12 rounds in 2:0")
    assert all(cell in markdown for table in run_tables.tables(records) for row in table.rows for cell in row)
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


def test_an_empty_run_has_a_report_which_shows_warnings(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round')
    records = RunRecords.load(tmp_path)
    assert run_tables.tables(records) == []
    text = write_report(records).read_text()
    assert "0 rounds, 0 clients" in text
    assert "**Warning**: metrics.jsonl" in text


BETTER = "ranks better than the server"
WORSE = "it teaches nothing"
UNSURE = "set public.gallery"


@pytest.mark.parametrize(
    ("ensemble", "held_out", "norm", "message"),
    [
        (12.0, 200.0, 0.9, [BETTER, "12.00 against 10.00 on 200 held-out samples"]),
        (9.0, 200.0, 0.9, [WORSE]),
        (9.0, 0.0, 0.9, [UNSURE, "public pairs that the server trains on"]),
        (12.0, 200.0, 0.3, [BETTER, "norm 0.30", "not aligned"]),
    ],
)
def test_instruments_are_read(tmp_path: Path, ensemble: float, held_out: float, norm: float, message: Any) -> None:
    folder = write_run(tmp_path / "run")
    metrics = {"teacher.r1_sum": ensemble, "student.r1_sum": 10.0, "teacher.gallery": held_out}
    metrics |= {"teacher.r1_sum.image": 11.0, "mean_norm.image": norm}
    write_measured(folder, {"server": metrics}, 1, 2, kind="train")
    table = run_tables.teacher_table(open_run(folder).records)
    notes = " ".join(table.notes)
    assert all(part in notes for part in message)
    assert ("not aligned" in notes) == (norm < 0.5)
    rows = {row[0]: row[2] for row in table.rows}
    assert rows["ensemble: r1_sum"] == f"{ensemble:.2f}"
    assert rows["ensemble: r1_sum, its image with the server's others"] == "11.00"
    assert "teacher.gallery" not in rows


def test_a_run_without_instruments_has_no_rows_of_an_ensemble(run_folder: Path) -> None:
    assert not [row for row in run_tables.teacher_table(open_run(run_folder).records).rows if "ensemble" in row[0]]


def ill(edema: int, effusion: int, both: int, none: int, **more: object) -> PartitionEntry:
    """A client with so many items of each combination of two diseases."""
    one, other, items = "mention_edema", "mention_effusion", edema + effusion + both + none
    labels = {"none": none, one: edema, other: effusion, f"{one}+{other}": both}
    columns = {one: {"0": none + effusion, "1": edema + both}, other: {"0": none + edema, "1": effusion + both}}
    result = {name: count for name, count in labels.items() if count}
    return PartitionEntry("reports", "notes", "train", items, items, result, columns=columns, **more)


@pytest.fixture
def held() -> dict[str, PartitionEntry]:
    test = {"split": "test", "items": 7, "labels": {"none": 7}, "index": []}
    return {"r-0": ill(3, 1, 2, 10, test=test, left_out={"text": 85}), "r-1": ill(0, 40, 0, 5, test=test)}


def test_tables_count_diseases_and_combinations(held):
    sizes, columns, classes = run_tables.partition_tables(held)
    assert sizes.rows == [("r-0", "16", "16", "7"), ("r-1", "45", "45", "7")]
    assert sizes.notes == ("Left out of 'notes' train: 85 without text.",)
    assert columns.columns == ["", "r-0", "r-1", "all"]
    assert columns.rows == [("edema", "5", "0", "5"), ("effusion", "3", "40", "43")]
    rows = ["none 10 5 15", "edema 3 0 3", "effusion 1 40 41", "edema+effusion 2 0 2"]
    assert [" ".join(row) for row in classes.rows] == rows


def test_many_clients_stand_one_below_the_other(held):
    _, columns, _ = run_tables.partition_tables({f"r-{k:02d}": held["r-0"] for k in range(13)})
    assert columns.columns == ["client", "edema", "effusion", "all"]
    assert columns.rows[0] == ("r-00", "5", "3", "8")
    assert len(columns.rows) == 13


def test_values_of_other_columns_are_counted_by_name():
    labels = {"Italy / stage 1": 2, "Spain / stage 2": 1}
    columns = {"country": {"Italy": 2, "Spain": 1}, "stage": {"1": 2, "2": 1}}
    held = {"a": PartitionEntry("g", "s", "train", 3, 3, labels, columns=columns)}
    assert run_tables.column_counts(held) == {"a": {"country Italy": 2, "country Spain": 1, "stage 1": 2, "stage 2": 1}}
    assert run_tables.classes_of(held) == ["Italy / stage 1", "Spain / stage 2"]
    assert run_tables.short_names(["country Italy"], held) == ["country Italy"]


def test_one_column_and_no_columns_have_no_table_by_column():
    one = {"a": PartitionEntry("g", "s", "train", 3, 3, {"Italy": 3}, columns={"country": {"Italy": 3}})}
    none = {"a": PartitionEntry("g", "s", "train", 3, 3, {"class 10": 1, "class 9": 2})}
    unlabelled = {"a": PartitionEntry("g", "s", "train", 3, 3)}
    assert [table.title for table in run_tables.partition_tables(one)] == ["g: sizes", "g: items by class"]
    assert [row[0] for row in run_tables.partition_tables(none)[1].rows] == ["class 9", "class 10"]
    assert [table.title for table in run_tables.partition_tables(unlabelled)] == ["g: sizes"]
    assert run_tables.partition_tables({}) == []


def test_classes_and_sizes_are_drawn_side_by_side(held, tmp_path):
    classes, bars, _ = partition_sheet(RunRecords(tmp_path, holdings=held)).draw().axes
    assert [text.get_text() for text in classes.texts] == ["10", "3", "1", "2", "5", "0", "40", "0"]
    assert [bar.get_width() for bar in bars.patches] == [16, 45]
    assert [label.get_text() for label in classes.get_xticklabels()] == ["none", "edema", "effusion", "edema+effusion"]


def test_a_run_folder_with_columns_is_drawn_and_shown_on_the_page(held, tmp_path):
    entries = {client: {**asdict(holding), "index": []} for client, holding in held.items()}
    (tmp_path / "partition.json").write_text(json.dumps(entries))
    records = RunRecords.load(tmp_path)
    assert records.holdings["r-0"].columns == held["r-0"].columns
    (path,) = [sheet.save(tmp_path / "plot.png") for sheet in run_figures(records).values()]
    with Image.open(path) as image:
        assert image.format == "PNG"
    page = html_report(records)
    assert "reports: items by column" in page
    assert "edema+effusion" in page


def test_items_held_in_addition_have_a_note():
    also = {"public": True, "source": "coco", "split": "train", "items": 2, "samples": 4, "labels": None, "index": []}
    held = {name: PartitionEntry("pairs", "flickr", "train", 5, 19, also=also) for name in ("a", "b")}
    (sizes,) = run_tables.partition_tables(held)
    assert sizes.notes == ("Counted above, but held in addition: 4 items, 8 samples of the public set, 'coco' train.",)
    assert run_tables.sources_of(held) == ["flickr train", "+ coco train, public"]
