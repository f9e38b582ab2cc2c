from __future__ import annotations

import io
import math
from statistics import fmean, stdev

import pytest
from PIL import Image
from rich.console import Console

from polyfed.reporting.compare import (
    Spread,
    clients_comparison_table,
    compare,
    comparison_rows,
    comparison_table,
    draw_comparison,
)
from polyfed.reporting.terminal import FittedTable
from polyfed.runs.records import RunRecords
from run_folders import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds of one configuration, and a run of another."""
    settings = [("cream", 30.0, 1), ("avg", 40.0, 1), ("cream", 30.0, 2), ("cream", 30.0, 3)]
    folder = tmp_path_factory.mktemp("runs")
    return [
        RunRecords.load(write_run(folder / f"{name}-{seed}", rounds=4, seed=seed, gain=gain, algorithm=name))
        for name, gain, seed in settings
    ]


def test_runs_that_differ_by_seed_are_taken_together(runs):
    cream, avg = compare(runs)
    assert [run.name for run in cream.runs] == ["cream-1", "cream-2", "cream-3"]
    assert (cream.label, avg.label, len(avg.runs)) == ("cream-1", "avg-1", 1)
    finals = [run.last("server")["r1_sum"] for run in cream.runs]
    figures = {name: spread.mean for name, spread in cream.metrics.items()}
    assert figures["server r1_sum final"] == pytest.approx(fmean(finals))
    assert cream.metrics["server r1_sum final"].std == pytest.approx(stdev(finals))
    assert math.isnan(avg.metrics["server r1_sum final"].std)
    assert figures["server r1_sum best"] >= figures["server r1_sum final"]
    accuracies = [[run.last(c)["accuracy"] for c in run.groups["image"] if run.last(c)] for run in cream.runs]
    assert figures["image accuracy"] == pytest.approx(fmean(map(fmean, accuracies)))
    assert figures["image accuracy worst"] == pytest.approx(fmean(map(min, accuracies)))
    apart = [max(values) - min(values) for values in accuracies]
    assert figures["image accuracy disparity"] == pytest.approx(fmean(apart))
    assert figures["MiB"] == pytest.approx(4 * 9 * 4_500_200 / 2**20)
    assert "paired r1_sum" in figures
    assert "server image_to_text_r@1 final" in compare(runs, "image_to_text_r@1", "validation")[0].metrics


@pytest.mark.parametrize(
    ("settings", "configurations"),
    [
        ([{"task": {"fold_seed": n, "name": "retrieval"}} for n in (1, 2)], 2),
        ([{"seed": n, "name": f"n{n}", "description": f"{n}"} for n in (1, 2)], 1),
    ],
    ids=["other seeds and nested names keep runs apart", "names and descriptions do not"],
)
def test_configurations_are_told_apart(tmp_path, settings, configurations):
    folders = [write_run(tmp_path / str(k), rounds=1, **changes) for k, changes in enumerate(settings)]
    assert len(compare([RunRecords.load(folder) for folder in folders])) == configurations


def test_runs_without_configuration_stay_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert len(compare([RunRecords.load(tmp_path / name) for name in "ab"])) == 2
    assert compare([]) == []


def test_rows_and_tables(runs):
    cream, avg = comparisons = compare(runs)
    first, second = comparison_rows(comparisons)
    assert (first["run"], second["run"], first["seeds"], first["MiB std"]) == ("cream-1", "avg-1", 3, 0.0)
    table = comparison_table(comparisons)
    assert [row[0] for row in table.rows] == ["avg-1", "cream-1"]
    stream = io.StringIO()
    Console(file=stream, width=200).print(FittedTable(table))
    assert str(cream.metrics["server r1_sum final"]) in stream.getvalue()
    # worst clients have a table of their own
    assert not any("worst" in name or "disparity" in name for name in table.columns)
    rows = {row[0]: row[1:] for row in clients_comparison_table([cream, avg]).rows}
    assert next(iter(rows)).startswith("avg-1: ")
    names = ("image accuracy", "image accuracy worst", "image accuracy disparity")
    assert rows["cream-1: image accuracy"] == tuple(str(cream.metrics[name]) for name in names)
    assert len(rows) == 6
    assert comparison_table([]).rows == clients_comparison_table([]).rows == []


def test_spread_ignores_what_is_not_finite():
    assert str(Spread.of([1.0, 3.0, math.nan])) == f"2.00 ± {2**0.5:.2f}"
    assert str(Spread.of([])) == "-"


def test_drawing(runs, tmp_path):
    path = draw_comparison(compare(runs), tmp_path / "out" / "compare.png", "accuracy")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(set(image.convert("RGB").resize((200, 200)).get_flattened_data())) > 20
