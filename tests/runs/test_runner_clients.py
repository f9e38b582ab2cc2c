"""Runs whose clients fail, answer late or answer what cannot be used; of those that raise, see tests/faults too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import polyfed
from misbehaving import contents, creamfl, facts, failing, happened
from polyfed.core.errors import ExchangeError
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from sessions import prepared, site_of
from small_federations import Config


@pytest.fixture(scope="module")
def misbehaved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Gives the run in whose second round one client misbehaves; not to be changed."""

    @cache
    def finished(how: str, evaluate_clients: bool = True) -> Run:
        config = failing(creamfl(), how)
        config["run"]["evaluate_clients"] = evaluate_clients
        return polyfed.run(Experiment.parse(config), tmp_path_factory.mktemp(how) / "run", quiet=True)

    return finished


@pytest.mark.parametrize(
    ("how", "reason", "has_traceback"),
    [
        ("raise", "ValueError: no GPU left", True),
        pytest.param("nan", "NaN", True, marks=pytest.mark.slow),  # the client finds this itself
        ("short", "expected [16, 8]", False),  # nothing was raised where the server could not use what came
    ],
)
def test_a_failing_client_is_named(misbehaved: Callable[..., Run], how: str, reason: str, has_traceback: bool) -> None:
    result = misbehaved(how)
    (excluded,) = result.records.excluded()
    assert (excluded.round, excluded.participant) == (2, "paired-0")
    assert reason in excluded.reason
    assert result.records.series("server", "senders.image", "train") == {1: 3.0, 2: 2.0, 3: 3.0}
    recalls = list(result.records.series("server", "r1_sum").values())
    assert len(recalls) == 4
    assert all(recall == recall for recall in recalls)
    assert (result.folder / "tracebacks.log").exists() == has_traceback


def test_a_step_that_failed_changed_nothing_on_its_client(misbehaved: Callable[..., Run]) -> None:
    states = misbehaved("raise").folder / "checkpoints/clients/paired-0"
    assert sorted(path.stem for path in states.iterdir()) == ["000001-00", "000003-00"]


def test_an_evaluation_in_the_same_round_shows_that_a_client_is_back(misbehaved: Callable[..., Run]) -> None:
    result = misbehaved("raise")
    assert happened(result) == [(2, "paired-0", "client_excluded"), (2, "paired-0", "client_returned")]
    assert result.records.events[-1].reason == "answered 'assess'"


@pytest.mark.slow
def test_who_is_away_is_remembered_by_a_resumed_run(misbehaved: Callable[..., Run], tmp_path: Path) -> None:
    complete = misbehaved("raise", evaluate_clients=False)
    folder = Path(shutil.copytree(complete.folder, tmp_path / "run"))
    for path in (folder / "checkpoints").glob("round-000003.*"):
        path.unlink()
    resumed = polyfed.resume(folder, quiet=True)
    of_clients = [event for event in happened(resumed) if event[1] != "server"]
    assert of_clients == [(2, "paired-0", "client_excluded"), (3, "paired-0", "client_returned")]
    assert contents(resumed) == contents(complete)


def test_a_reply_that_is_refused_does_not_move_its_client(misbehaved: Callable[..., Run]) -> None:
    """The client keeps its step, and the server accepts none: it goes on from where it stood before."""
    folder = misbehaved("short").folder
    labels = sorted(path.stem for path in (folder / "checkpoints/clients/paired-0").iterdir())
    assert labels == ["000001-00", "000003-00"]
    assert facts(folder, 2)["accepted"] == {"paired-0": [1, 0], "paired-1": [2, 0], "image": [2, 0]}
    assert facts(folder, 3)["accepted"] == {client: [3, 0] for client in ("paired-0", "paired-1", "image")}


def test_answers_that_come_too_late_never_happened(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = {"name": "local", "local_epochs": 1}
    tiny["run"] |= {"exchange": {"min_clients": 0, "phases": {"fit": {"deadline": 1e-9}}}}
    result = polyfed.run(Experiment.parse(tiny), tmp_path / "a", quiet=True)
    excluded = result.records.excluded()
    assert len(excluded) == 2 * 3
    assert {event.reason for event in excluded} == {"no answer within 1e-09 s"}
    assert facts(result.folder, 2)["accepted"] == {}
    untrained = tiny | {"run": tiny["run"] | {"rounds": 1, "exchange": {}}, "algorithm": "server_only"}
    initial = polyfed.run(Experiment.parse(untrained), tmp_path / "b", quiet=True)
    for client in ("paired-0", "image"):
        assert result.metrics(client) == initial.metrics(client)


def test_limits_of_the_run_hold_on_both_sides(config: Config, tmp_path: Path) -> None:
    config["run"]["exchange"] = {"limits": {"row_norm": 0.5}}  # representations have unit norm
    with pytest.raises(ExchangeError, match=r"representations: tensor '\w+' has norm 1, the limit is 0\.5"):
        polyfed.run(Experiment.parse(config), tmp_path / "a", quiet=True)
    config["run"]["exchange"] = {"limits": {"row_norm": 1e9, "tensor_norm": 1e9}}
    session = prepared(config, tmp_path / "b")
    assert site_of(session).limits == session.experiment.run.exchange.limits
