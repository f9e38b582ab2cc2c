"""One model of a run: every surface is about that of the round which validation chose, and names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed import Experiment, open_run
from polyfed.algorithms.fedavg import FedAvg
from polyfed.data.views.features import FeatureComputation
from polyfed.export.model import export_model
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.reporting.gallery import write_gallery
from polyfed.reporting.page import html_report, write_report
from polyfed.reporting.run_tables import evaluation_tables
from polyfed.reporting.summary import RunSummary
from polyfed.runs.evaluation import evaluate_model
from polyfed.runs.opened import Run
from polyfed.runs.records import RunRecords
from polyfed.tasks.retrieval import PairRetrieval
from run_folders import write_lines
from small_federations import Config, tiny_experiment
from tiny_networks import save


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose last round leaves a model at chance, and its server alone."""
    folder, fit = tmp_path_factory.mktemp("runs"), FedAvg.round

    def spoils(self: FedAvg, server: Server, cohort: Cohort) -> None:
        fit(self, server, cohort)
        if server.clock.round == server.clock.rounds:
            with torch.no_grad():
                for parameter in server.model.parameters():
                    parameter.zero_()

    config = tiny_experiment()
    config["run"] |= {"rounds": 2, "evaluate_clients": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedAvg, "round", spoils)
        run = polyfed.run(Experiment.load(config), folder / "mine", quiet=True)
    del config["run"]["evaluate_clients"]
    alone = config | {"algorithm": {"name": "server_only"}, "clients": {}}
    polyfed.run(Experiment.load(alone), folder / "alone", quiet=True)
    (folder / "alone" / "report.html").touch()
    return run


@pytest.fixture(scope="module")
def expected(mine: Run) -> tuple[int, float, float]:
    """Round that is best on validation, its sum of recalls on test data, and that of the server alone."""

    def judged(run: Run) -> tuple[int, float]:
        validation = run.records.series("server", "r1_sum", "validation")
        number = max(validation, key=lambda number: (validation[number], number > 0, -number))
        return number, run.records.series("server", "r1_sum")[number]

    number, value = judged(mine)
    assert (number < 2, mine.records.series("server", "r1_sum")[2] < value) == (True, True)
    return number, value, judged(open_run(mine.folder.parent / "alone"))[1]


def at_the_end(run: Run, out: Path) -> str:
    summary = RunSummary(run.records)
    return f"{summary.verdict} {summary.table.notes[0]}"


def compared(run: Run, out: Path) -> str:
    (row,) = polyfed.compare([run]).table.rows
    return f"model of round {row[2]}: {row[3]}"


def exported(run: Run, out: Path) -> str:
    number = json.loads((export_model(run, out / "export") / "config.json").read_text())["round"]
    return f"model of round {number}: {evaluate_model(run, 'scenes', which=str(number)).metrics['r1_sum']:.2f}"


SURFACES: dict[str, Callable[[Run, Path], str]] = {
    "the end of a run": at_the_end,
    "report.md": lambda run, out: write_report(run.records).read_text(),
    "report.html": lambda run, out: html_report(run.records, figures={}),
    "compare": compared,
    "evaluate": lambda run, out: str(evaluation_tables(evaluate_model(run, "scenes"))),
    "export": exported,
    "notebook": lambda run, out: f"{run._repr_html_()} {run.metrics()['r1_sum']:.2f}",
}


@pytest.mark.parametrize("surface", SURFACES)
def test_surfaces_name_that_round(mine: Run, expected: tuple[int, float, float], tmp_path: Path, surface: str) -> None:
    number, value, _ = expected
    text = SURFACES[surface](mine, tmp_path)
    assert (f"model of round {number}" in text, f"{value:.2f}" in text) == (True, True)
    assert "model of round 2" not in text


def test_gains_are_those_of_the_chosen_rounds(mine: Run, expected: tuple[int, float, float]) -> None:
    _, value, alone = expected
    (result,) = RunSummary(mine.records).results
    assert 2 * result.difference == pytest.approx(value - alone)
    (paired,) = polyfed.compare([mine.folder.parent / "alone", mine]).differences
    assert (paired.metric, paired.by_seed) == ("server r1_sum", {0: pytest.approx(value - alone)})


def test_models_in_use_are_that_of_the_chosen_round(mine: Run, expected: tuple[int, float, float]) -> None:
    assert mine.model.name == f"server model of mine, round {expected[0]}"
    page = write_gallery(mine, queries=1).read_text()
    assert f"After: the server's model of round {expected[0]}, best on validation (r1_sum" in page


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        ([1.0, 3.0, 3.0, 2.0], (1, "model of round 1, best on validation (m 3.00)")),
        ([3.0, 1.0, 3.0, 3.0], (2, "model of round 2, best on validation (m 3.00)")),
        ([3.5, 1.0, 3.0, 3.0], (0, "model of round 0, best on validation (m 3.50)")),
        ([float("nan"), 0.5, float("nan"), 0.0], (1, "model of round 1, best on validation (m 0.50)")),
        ([float("nan")] * 4, (3, "model of round 3, the last")),
        ([], (3, "model of round 3, the last")),
    ],
)
def test_the_earliest_best_round_is_chosen(tmp_path: Path, validation: list[float], expected: tuple[int, str]) -> None:
    lines = [
        {"round": number, "participant": "server", "kind": measured, "metrics": {"m": value, "accuracy": -value}}
        for measured, values in (("test", [4.0, 3.0, 2.0, 1.0]), ("validation", validation))
        for number, value in enumerate(values)
    ]
    write_lines(tmp_path / "metrics.jsonl", lines)
    records = RunRecords.load(tmp_path)
    assert (records.chosen.number, str(records.chosen)) == expected
    assert records.metrics("server")["m"] == 4.0 - expected[0]


class Backwards(PairRetrieval):
    """A task of one's own whose selecting metric comes last."""

    def evaluate(self, *samples: Any, **batches: Any) -> dict[str, float]:
        """See ``Task``."""
        return dict(reversed(super().evaluate(*samples, **batches).items()))


class Level(PairRetrieval):
    """A task on which no training shows."""

    def evaluate(self, *samples: Any, **batches: Any) -> dict[str, float]:
        """See ``Task``."""
        return {"r1_sum": 1.0}


def run_of_task(task: str, tiny: Config, folder: Path, rounds: int) -> Run:
    for part in (tiny["server"], tiny["clients"]["paired"]):
        part["task"] = {"name": f"test_one_model.{task}"}
    tiny["run"] |= {"rounds": rounds, "evaluate_clients": False}
    return polyfed.run(Experiment.load(tiny), folder / "run", quiet=True)


def test_of_equal_rounds_the_first_trained_is_saved_and_nothing_warns_of_round_0(tiny: Config, tmp_path: Path) -> None:
    run = run_of_task("Level", tiny, tmp_path, 2)
    saved = json.loads((run.folder / "models" / "best" / "config.json").read_text())["round"]
    assert (saved, run.records.chosen.number, run.records.warnings) == (1, 1, ())


def test_what_selects_models_stands_first_in_the_records(tiny: Config, tmp_path: Path) -> None:
    records = run_of_task("Backwards", tiny, tmp_path, 1).records
    assert (records.chosen.metric, next(iter(records.metrics("server")))) == ("r1_sum", "r1_sum")


def test_a_gallery_takes_features_from_the_cache(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("vit", tmp_path / "weights")
    tiny["data"] |= {"weights_dir": str(tmp_path / "weights"), "cache_dir": str(tmp_path / "cache")}
    for part in (tiny["server"], *tiny["clients"].values()):
        part["model"]["encoders"]["image"] = {"name": "projection", "view": {"name": "features", "backbone": "vit"}}
    tiny["run"] |= {"rounds": 1, "evaluate_clients": False}
    run = polyfed.run(Experiment.load(tiny), tmp_path / "run", quiet=True)
    computed = list[int]()
    compute = FeatureComputation.__call__
    monkeypatch.setattr(FeatureComputation, "__call__", lambda self, rows: computed.extend(rows) or compute(self, rows))
    assert "<h3>server</h3>" in write_gallery(open_run(run.folder), queries=1).read_text()
    assert computed == []
