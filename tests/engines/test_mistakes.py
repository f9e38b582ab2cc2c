"""Mistakes in an author's code: each ends the run at once, in a line with its place and cause."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import failing
import pytest
from rich.console import Console

import polyfed
from polyfed.core.errors import StepError
from polyfed.lab.analysis.cost import DryRun
from polyfed.reporting.progress import PlainProgress
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.wire.ledger import Ledger
from sessions import prepared, site_of
from small_federations import Config

STEP = "step 'fit' of Mistaken"
FILE = failing.__file__


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path(FILE).read_text().splitlines(), 1) if text in line)


@pytest.fixture
def mistaken(tiny: Config, tmp_path: Path) -> Callable[..., Run]:
    """Runs a method whose client ``image`` does what an author did by mistake."""

    def ran(how: str, **run: Any) -> Run:
        experiment = tiny | {"algorithm": {"name": "failing.Mistaken", "how": how}, "run": tiny["run"] | run}
        return polyfed.run(Experiment.parse(experiment), tmp_path / "run", quiet=True)

    return ran


SAID = {
    "return": rf": TypeError: {STEP} returned None; return a Reply",
    "nan": rf", {STEP}: weights: tensor '\S+' has NaN or infinite values; the loss was nan in optimisation step 3 of 4",
    "shape": rf", {STEP}: weights are not what was asked for, first at '\S+': float32 \[16\], expected \S+ \[8\]",
    "name": rf", {STEP}: reply lacks 'num_examples' \(int\); did you mean 'num_example', which it has\?",
}


@pytest.mark.parametrize("how", SAID)
def test_a_mistake_stops_the_run_in_one_line(mistaken: Callable[..., Run], how: str) -> None:
    with pytest.raises(StepError) as caught:
        mistaken(how)
    place = rf"\({FILE}:{line_of('Mistaken(FedAvg)') + 6}; run.on_error: exclude would go on without the client\)"
    assert re.match(rf"round 1: client 'image'{SAID[how]} {place}", str(caught.value))
    assert caught.value.__cause__ is not None


def test_who_leaves_the_debugger_leaves_the_run(mistaken: Callable[..., Run], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        mistaken("debugger", on_error="exclude")
    assert not polyfed.open_run(tmp_path / "run").records.excluded()


def test_replies_are_counted_not_clients_that_come_back_to_be_measured(tiny: Config, tmp_path: Path) -> None:
    config = tiny | {"algorithm": {"name": "failing.Mistaken", "how": "return"}}
    experiment = Experiment.parse(config | {"run": tiny["run"] | {"rounds": 1, "on_error": "exclude"}})
    shown = PlainProgress(Console(file=io.StringIO(), width=500))
    result = polyfed.run(experiment, tmp_path / "run", [shown], quiet=True)
    (excluded,) = result.records.excluded()
    assert result.metrics("image")  # it was measured
    assert "2/3 clients" in shown._console.file.getvalue()  # type: ignore[attr-defined]
    assert excluded.reason == f"TypeError: {STEP} returned None; return a Reply"


def test_a_dry_run_shows_the_authors_line_as_a_run_does(tiny: Config) -> None:
    text = rf"client 'image', step 'fit' of Failing: ZeroDivisionError: division by zero \({FILE}:{line_of('1 / 0')}; "
    with pytest.raises(StepError, match=text) as caught:
        DryRun.of(Experiment.parse(tiny | {"algorithm": {"name": "failing.Failing"}}))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("run", "causes"),
    [
        ({}, {"failed", "invalid"}),
        ({"engine": "ray"}, {"failed", "invalid"}),
        ({"engine": "flower"}, set()),
        ({"engine": "flower", "on_error": "stop"}, {"failed", "invalid"}),
        ({"exchange": {"on_error": "exclude"}}, set()),
        # what attackers send is what the run measures
        ({"attackers": "sign_flip"}, {"failed"}),
        ({"attackers": "sign_flip", "on_error": "stop"}, {"failed", "invalid"}),
    ],
)
def test_what_stops_a_run_goes_by_its_engine_and_its_attackers(tiny: Config, run: Config, causes: set[str]) -> None:
    experiment = Experiment.parse(tiny | {"run": tiny["run"] | run})
    assert experiment.run.stopped_by == causes
    assert Experiment.parse(experiment.model_dump(mode="json")).run.stopped_by == causes


def test_a_protected_client_of_a_simulation_hides_no_mistake(tiny: Config, tmp_path: Path) -> None:
    privacy = {"reply": {"weights": 1.0, "noise_multiplier": 1.0}, "metrics": "clear"}
    config = tiny | {"algorithm": {"name": "failing.Mistaken", "how": "return"}, "privacy": privacy}
    session = prepared(config, tmp_path / "run")
    with pytest.raises(StepError, match=f"{STEP} returned None"):
        session.experiment.algorithm.round(session.server, session.cohort(1, Ledger()))
    assert site_of(session).terms.stops
