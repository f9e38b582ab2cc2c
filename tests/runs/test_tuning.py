"""Tuning of twins: what validation chooses, how far the search goes, and what an interruption leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyfed.core.errors import ConfigError, DataError, RunError
from polyfed.runs import tuning
from polyfed.runs.events import Measured, RunStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.records import RunRecords
from polyfed.runs.tuning import tuned_twin, tuning_folder
from small_federations import three_kinds

RATE = 0.05  # of the server of ``three_kinds``, which has two passes a round with CreamFL
Landscape = Callable[[float, int], float]


class Runs:
    """Stands for runs: what validation says is a function of the factors of rate and passes, and test says the reverse.

    Attributes:
        tried: factors of rate and passes of each run.
        fail_at: number of the run that ends in ``failure``.
    """

    def __init__(self, value: Landscape) -> None:
        self._value = value
        self.tried: list[tuple[float, int]] = []
        self.experiments: list[Experiment] = []
        self.fail_at, self.failure = -1, KeyboardInterrupt()

    def __call__(self, experiment: Experiment, out: Path) -> SimpleNamespace:
        assert experiment.server is not None
        assert not out.exists()
        out.mkdir()
        (out / "run.json").touch()
        if len(self.tried) == self.fail_at:
            raise self.failure
        rate = experiment.server.training.optimizer.lr / RATE
        point = round(rate, 6), experiment.algorithm.server_epochs // 2
        self.tried.append(point)
        self.experiments.append(experiment)
        value = self._value(*point)
        best, worse = {"r1_sum": value}, {"r1_sum": value - 1}
        validation = [Measured(k, "server", "validation", m) for k, m in enumerate([worse, best, worse])]
        test = [Measured(k, "server", "test", {"r1_sum": -value}) for k in range(3)]
        return SimpleNamespace(records=RunRecords(out, (*test, *validation)))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Landscape], Runs]:
    def stand_in(value: Landscape) -> Runs:
        made = Runs(value)
        monkeypatch.setattr(tuning, "begin_run", made)
        return made

    return stand_in


def server_only(*overrides: str) -> Experiment:
    return Experiment.load(three_kinds(name="creamfl"), ["twin.kind=server-only", *overrides])


def peak(rate: float, passes: int) -> Landscape:
    """Best at one place, and worse with every factor of 2 away from it."""
    return lambda r, p: -abs(_log2(r / rate)) - abs(_log2(p / passes))


def _log2(value: float) -> float:
    return len(bin(int(value * 1024))) - len(bin(1024))


def record(experiment: Experiment, out: Path) -> tuple[Experiment, dict]:
    """The twin that is chosen, and what its run says of the choice."""
    chosen, callback = tuned_twin(experiment, out)
    assert not out.exists()
    out.mkdir(parents=True)
    callback.handle(RunStarted("", 1, 0))
    assert sorted(path.name for path in out.parent.iterdir()) == [out.name]
    return chosen, json.loads((out / "tuning.json").read_text())


def test_validation_chooses_and_never_test(runs: Callable[[Landscape], Runs], tmp_path: Path) -> None:
    made = runs(peak(2, 2))
    chosen, facts = record(server_only("run.output.sinks=[tensorboard]"), tmp_path / "runs" / "twin")
    assert made.tried == [(1, 1), (2, 1), (0.5, 1), (4, 1), (2, 2), (2, 4), (4, 2), (1, 2)]
    assert chosen.server is not None and chosen.twin is not None  # noqa: PT018
    assert (chosen.server.training.optimizer.lr, chosen.algorithm.server_epochs) == (2 * RATE, 4)
    assert chosen.twin.tuned == {"server.training.optimizer.lr": RATE, "algorithm.server_epochs": 2}
    assert "rate 0.1 and 4 passes a round chosen on validation" in chosen.description
    assert facts["chosen"] == {"rate": 2.0, "passes": 2.0}
    assert facts["candidates"][0] == {"rate": 1.0, "passes": 1.0, "round": 1, "validation": -2.0}
    # candidates tell no tracker of themselves, the run does
    assert not any(candidate.run.output.sinks for candidate in made.experiments)
    assert [sink.component_name() for sink in chosen.run.output.sinks] == ["tensorboard"]
    assert not chosen.twin.is_to_be_tuned


@pytest.mark.parametrize(("rate", "candidates", "tried"), [(64, 9, 9), (64, 12, 10), (0.5, 9, 5), (1, 2, 2)])
def test_a_warning_says_where_the_candidates_were_too_few(
    runs: Callable[[Landscape], Runs],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    rate: float,
    candidates: int,
    tried: int,
) -> None:
    made = runs(peak(rate, 1))
    record(server_only(f"twin.candidates={candidates}"), tmp_path / "twin")
    assert len(made.tried) == tried
    assert ("neighbours that were not tried; give twin.candidates" in caplog.text) == (tried == candidates)


def test_rates_are_those_that_optimisers_take(runs: Callable[[Landscape], Runs], tmp_path: Path) -> None:
    made = runs(lambda rate, passes: rate)
    record(server_only("server.training.optimizer.lr=60"), tmp_path / "high")  # 100 at most
    assert max(experiment.server.training.optimizer.lr for experiment in made.experiments if experiment.server) == 60


def test_a_candidate_that_diverged_is_not_chosen_and_of_equals_the_methods_own(
    runs: Callable[[Landscape], Runs], tmp_path: Path
) -> None:
    runs(lambda rate, passes: float("nan") if rate > 1 else 7.0)
    _, facts = record(server_only(), tmp_path / "twin")
    assert facts["chosen"] == {"rate": 1.0, "passes": 1.0}
    assert facts["candidates"][1] == {"rate": 2.0, "passes": 1.0, "round": None, "validation": None}
    runs(lambda rate, passes: float("nan"))
    with pytest.raises(RunError, match="no candidate has a figure; nothing is chosen; look at its rate"):
        tuned_twin(server_only(), tmp_path / "none")


@pytest.mark.slow
def test_an_interrupted_search_goes_on_behind_the_last_candidate(
    runs: Callable[[Landscape], Runs], tmp_path: Path
) -> None:
    out = tmp_path / "twin"
    made = runs(peak(2, 2))
    made.fail_at = 4
    with pytest.raises(KeyboardInterrupt):
        tuned_twin(server_only(), out)
    assert {path.name for path in tuning_folder(out).iterdir()} == {".lock", "tuning.json"}
    before, made.fail_at = list(made.tried), -1
    (tuning_folder(out) / "candidate").mkdir()  # as a killed process leaves it
    with pytest.raises(RunError, match=r"twin\.tuning' has the tuning of .* with other settings; delete it, or"):
        tuned_twin(server_only("run.seed=1"), out)
    with RunFolder(tuning_folder(out)).lock(), pytest.raises(RunError, match="another process is working on"):
        tuned_twin(server_only(), out)
    assert made.tried == before
    _, facts = record(server_only(), out)
    assert len(made.tried) == len(set(made.tried)) == len(facts["candidates"]) == 8


def test_what_fails_at_once_leaves_nothing(runs: Callable[[Landscape], Runs], tmp_path: Path) -> None:
    made = runs(peak(1, 1))
    made.fail_at, made.failure = 0, DataError("no such file")
    with pytest.raises(DataError):
        tuned_twin(server_only(), tmp_path / "runs" / "twin")
    assert not list(tmp_path.iterdir())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(RunError, match="exists and is not empty"):
        tuned_twin(server_only(), tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"use Experiment\.load"):
        tuned_twin(Experiment.parse(three_kinds(name="creamfl") | {"twin": {"kind": "pooled"}}), tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_one_candidate_is_the_methods_own_and_nothing_is_tried() -> None:
    own, other = server_only(), server_only("twin.candidates=1")
    assert own.twin is not None
    assert other.twin is not None
    assert (own.twin.is_to_be_tuned, other.twin.is_to_be_tuned, other.twin.of) == (True, False, "three-kinds")
    assert (other.server, other.algorithm) == (own.server, own.algorithm)
