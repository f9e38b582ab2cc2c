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
from polyfed.runs.records import RunRecords
from run_folders import write_run


@pytest.fixture
def runs(tmp_path):
    settings = [("cream", 30.0, 1), ("avg", 40.0, 1), ("cream", 30.0, 2), ("cream", 30.0, 3)]
    return [
        RunRecords.load(write_run(tmp_path / f"{name}-{seed}", rounds=4, seed=seed, gain=gain, algorithm=name))
        for name, gain, seed in settings
    ]


def test_runs_that_differ_by_seed_are_taken_together(runs):
    cream, avg = compare(runs)
    assert [run.name for run in cream.runs] == ["cream-1", "cream-2", "cream-3"]
    assert (cream.label, avg.label, len(avg.runs)) == ("cream-1", "avg-1", 1)
    finals = [run.last("server")["r1_sum"] for run in cream.runs]
    assert cream.figures["server r1_sum final"].mean == pytest.approx(fmean(finals))
    assert cream.figures["server r1_sum final"].std == pytest.approx(stdev(finals))
    assert math.isnan(avg.figures["server r1_sum final"].std)
    assert cream.figures["server r1_sum best"].mean >= cream.figures["server r1_sum final"].mean
    accuracies = [fmean(run.last(c)["accuracy"] for c in run.groups["image"] if run.last(c)) for run in cream.runs]
    assert cream.figures["image accuracy"].mean == pytest.approx(fmean(accuracies))
    worst = [min(run.last(c)["accuracy"] for c in run.groups["image"] if run.last(c)) for run in cream.runs]
    best = [max(run.last(c)["accuracy"] for c in run.groups["image"] if run.last(c)) for run in cream.runs]
    assert cream.figures["image accuracy worst"].mean == pytest.approx(fmean(worst))
    assert cream.figures["image accuracy disparity"].mean == pytest.approx(fmean(best) - fmean(worst))
    assert comparison_rows([cream])[0]["image accuracy worst"] == pytest.approx(fmean(worst))
    assert cream.figures["MiB"].mean == pytest.approx(4 * 9 * 4_500_200 / 2**20)
    assert "paired r1_sum" in cream.figures


def test_another_metric_can_be_asked_for(runs):
    (cream, _) = compare(runs, "image_to_text_r@1", "validation")
    assert "server image_to_text_r@1 final" in cream.figures


def test_fold_seeds_and_nested_names_keep_runs_apart(tmp_path):
    one, two = (
        RunRecords.load(write_run(tmp_path / f"{n}", rounds=1, task={"fold_seed": n, "name": "retrieval"}))
        for n in (1, 2)
    )
    assert len(compare([one, two])) == 2
    named = [
        RunRecords.load(write_run(tmp_path / f"n{n}", rounds=1, seed=n, name=f"n{n}", description=f"{n}"))
        for n in (1, 2)
    ]
    assert len(compare(named)) == 1


def test_runs_without_configuration_stay_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    assert len(compare([RunRecords.load(tmp_path / name) for name in "ab"])) == 2


def test_rows_and_table(runs):
    found = compare(runs)
    rows = comparison_rows(found)
    assert [row["run"] for row in rows] == ["cream-1", "avg-1"]
    assert rows[0]["seeds"] == 3
    assert rows[0]["MiB std"] == 0.0
    table = comparison_table(found)
    assert [row[0] for row in table.rows] == ["avg-1", "cream-1"]
    stream = io.StringIO()
    Console(file=stream, width=200).print(table.rich())
    assert str(found[0].figures["server r1_sum final"]) in stream.getvalue()
    assert not any("worst" in name or "disparity" in name for name in table.columns)
    assert comparison_table([]).rows == []


def test_worst_clients_have_a_table_of_their_own(runs):
    cream, avg = compare(runs)
    rows = {row[0]: row[1:] for row in clients_comparison_table([cream, avg]).rows}
    assert next(iter(rows)).startswith("avg-1: ")
    names = ("image accuracy", "image accuracy worst", "image accuracy disparity")
    assert rows["cream-1: image accuracy"] == tuple(str(cream.figures[name]) for name in names)
    assert len(rows) == 6
    assert clients_comparison_table([]).rows == []


def test_spread_ignores_what_is_not_finite():
    assert str(Spread.of([1.0, 3.0, math.nan])) == f"2.00 ± {2**0.5:.2f}"
    assert str(Spread.of([])) == "-"


def test_drawing(runs, tmp_path):
    path = draw_comparison(compare(runs), tmp_path / "out" / "compare.png", "accuracy")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(set(image.convert("RGB").resize((200, 200)).get_flattened_data())) > 20
