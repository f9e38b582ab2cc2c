"""Outcomes by test item: they give the metric, and claims vary over draws of items as a naive loop says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from polyfed.lab.studies.columns.metric import Metric
from polyfed.lab.studies.item_outcomes import ItemMeans, ItemRecorder, item_spreads
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.session import run_study
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import claims_tables
from polyfed.reporting.statistics import ItemSpread, PairedSample
from polyfed.runs.events import Measured
from polyfed.tasks.scores import TaskScores, mean_by_item
from run_folders import write_lines

Load = Callable[..., Study]
R1 = Metric(metric="r1_sum")
CLAIM = "prox > tiny on r1"


def cell(folder: Path, hits: Sequence[Sequence[float]], items: Sequence[int], rounds: Sequence[int] = (1,)) -> float:
    """A cell whose r1_sum is the sum of means of ``hits`` over samples of ``items``; gives the metric."""
    terms = [mean_by_item(torch.tensor(values), torch.tensor(items)) for values in hits]
    value = sum(sum(values) / len(values) for values in hits)
    scores = TaskScores({"r1_sum": value, "one": sum(hits[0]) / len(hits[0])}, {"r1_sum": terms, "one": terms[:1]})
    folder.mkdir(parents=True)
    for number in rounds:
        ItemRecorder(folder).handle(Measured(number, "server", "test", scores))
    lines = [{"round": number, "participant": "server", "kind": "test", "metrics": dict(scores)} for number in rounds]
    write_lines(folder / "metrics.jsonl", lines)
    return value


@pytest.mark.slow
def test_a_run_keeps_the_outcomes_of_two_rounds_which_give_its_metrics(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=2, set={"run.rounds": 3, "run.eval_every": 1}, claims={"primary": [CLAIM]})
    results = run_study(study, tmp_path / "out", jobs=2).results
    for label, name in results.cells.items():
        folder = tmp_path / "cells" / name
        assert 1 <= len(list((folder / "items").iterdir())) <= 2
        means = ItemMeans.of(folder, R1)
        assert means is not None
        row, seed = label.split(", seed ")
        assert means.value == pytest.approx(results.at(row, (), "r1")[int(seed)], abs=1e-4)
    (spread,) = results.items.values()
    low, high = spread.interval
    sample = results.sample(study.claims.to_judge[0])
    assert isinstance(sample, PairedSample)
    assert low <= sample.mean <= high
    assert Results.load(tmp_path / "out").items == results.items


def test_captions_of_a_picture_are_one_item(tmp_path: Path) -> None:
    value = cell(tmp_path / "a", [[100.0, 0.0, 100.0, 100.0], [0.0, 0.0, 100.0, 0.0]], [3, 3, 5, 8])
    means = ItemMeans.of(tmp_path / "a", R1)
    assert means is not None
    assert means.items.tolist() == [3, 5, 8]
    assert means.terms[0].tolist() == [[100, 100, 100], [2, 1, 1]]
    assert means.value == pytest.approx(value) == 100
    one = ItemMeans.of(tmp_path / "a", Metric(metric="one"))
    assert one is not None
    assert one.value == 75


@pytest.mark.parametrize(
    "column", [Metric(metric="loss"), Metric(metric="r1_sum", kind="validation"), Metric(metric="r1_sum", of="image")]
)
def test_other_figures_have_no_outcomes(tmp_path: Path, column: Metric) -> None:
    cell(tmp_path / "a", [[100.0, 0.0]], [0, 1])
    assert ItemMeans.of(tmp_path / "a", column) is None


def test_a_cell_of_another_round_than_the_column_reads_has_none(tmp_path: Path) -> None:
    cell(tmp_path / "a", [[100.0, 0.0]], [0, 1], rounds=(1, 2))
    assert ItemMeans.of(tmp_path / "a", R1) is not None
    (tmp_path / "a" / "items" / "2.safetensors").unlink()
    assert ItemMeans.of(tmp_path / "a", R1) is None  # the last round counts where nothing was validated


def own_results(
    loaded: Load, tmp_path: Path, items: Sequence[Sequence[int]]
) -> tuple[Results, dict[str, list[list[float]]]]:
    study = loaded(seeds=2, claims={"primary": [CLAIM]})
    draw = torch.Generator().manual_seed(5)
    hits: dict[str, list[list[float]]] = {"tiny": [], "prox": []}
    values: dict[str, dict[int, float]] = {"tiny": {}, "prox": {}}
    cells = {}
    for number, (row, seed) in enumerate((row, seed) for row in hits for seed in (0, 1)):
        own = (100.0 * torch.randint(2, (6,), generator=draw)).tolist()
        hits[row].append(own)
        values[row][seed] = cell(tmp_path / f"{row}{seed}", [own], items[number % len(items)])
        cells[f"{row}, seed {seed}"] = f"{row}{seed}"
    return Results(study, {(row, (), "r1"): by for row, by in values.items()}, cells=cells), hits


def test_a_claim_varies_over_items_as_in_a_naive_loop(loaded: Load, tmp_path: Path) -> None:
    items = [0, 0, 1, 2, 3, 3]
    results, hits = own_results(loaded, tmp_path, [items])
    (spread,) = item_spreads(results, tmp_path).values()
    drawn = []
    for row in torch.randint(4, (2000, 4), generator=torch.Generator().manual_seed(0)).tolist():
        chosen = [place for item in row for place, own in enumerate(items) if own == item]
        means = {name: [sum(own[k] for k in chosen) / len(chosen) for own in of] for name, of in hits.items()}
        drawn.append(sum(a - b for a, b in zip(means["prox"], means["tiny"], strict=True)) / 2)
    values = torch.tensor(drawn, dtype=torch.float64)
    assert spread.items == 4
    assert spread.std == pytest.approx(float(values.std()))
    assert spread.interval == pytest.approx(tuple(values.quantile(torch.tensor([0.025, 0.975]).double()).tolist()))


def test_cells_of_other_test_items_or_without_outcomes_are_not_compared(loaded: Load, tmp_path: Path) -> None:
    results, _ = own_results(loaded, tmp_path, [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6]])
    assert item_spreads(results, tmp_path) == {}
    assert item_spreads(results, tmp_path / "elsewhere") == {}


def test_tables_say_of_what_more_is_needed(loaded: Load) -> None:
    study = loaded(seeds=5, claims={"primary": [CLAIM], "secondary": ["prox > tiny on MiB"]})
    values = {("tiny", (), "r1"): dict.fromkeys(range(5), 1.0), ("prox", (), "r1"): {k: 2.0 + k for k in range(5)}}
    (claim,) = study.claims.to_judge
    spread = 2.5**0.5 / 5**0.5  # of the mean, over seeds
    for std, needs in ((0.9 * spread, "seeds"), (1.1 * spread, "test data")):
        own = Results(study, values, items={claim: ItemSpread(100, std, (2.0, 4.0))})
        judged, read = claims_tables(own)
        assert judged.rows[0][-2:] == ["+2.00 to +4.00", needs]
        assert "needs more" not in read.columns
