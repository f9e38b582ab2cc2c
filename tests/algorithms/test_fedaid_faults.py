"""FedAID: replies and clients that cannot be used, and runs killed between phases."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_sessions import CLIENTS, Values, events, fields, global_model, heard, session_of, staged

import polyfed
from by_hand import play
from misbehaving import contents
from polyfed.runs.events import Callback, ClientDone, Event, RoundStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.settings import RunSettings
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Weights
from sessions import first_cohort, metrics, site_of
from small_federations import Config, aligned

pytestmark = pytest.mark.slow

# ---- replies and clients that cannot be used


SPOILT: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "loss": ("judge", lambda actual: {"loss": math.nan}),
    "endless loss": ("judge", lambda actual: {"loss": math.inf}),
    "trained": ("guide", lambda actual: actual | {"weights": spoilt(actual["weights"], math.nan)}),
    "robust": ("teach", lambda actual: {"weights": spoilt(actual["weights"], math.nan)}),
    "part": ("teach", lambda actual: {"weights": dict(list(actual["weights"].items())[1:])}),
    "samples": ("guide", lambda actual: actual | {"num_examples": 31}),
}


def spoilt(weights: Values, by: float) -> Values:
    return {name: value * by if value.is_floating_point() else value for name, value in weights.items()}


@pytest.mark.parametrize("what", SPOILT)
def test_replies_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    step, change = SPOILT[what]

    def spoil(request: Request, answer: Answer) -> Answer:
        if (request.client, request.step, request.round) != ("hospital-0", step, 1) or answer.payload is None:
            return answer
        actual = change(fields(answer.payload))
        content = {name: Weights(value) if isinstance(value, dict) else value for name, value in actual.items()}
        return Answer("hospital-0", Payload(content))

    monkeypatch.setattr(RunSettings, "stopped_by", frozenset())  # as on_error: exclude
    session = session_of(tmp_path)
    heard(session, monkeypatch, spoil)
    play(session, 1, 1)
    assert events(session) == [("hospital-0", "client_excluded")]
    assert all(bool(value.isfinite().all()) for value in global_model(session).values())
    assert all(math.isfinite(value) for value in metrics(session).values())


def judged_whole(method: str) -> Config:
    """Losses are measured on all samples, which is FedAID's default."""
    return {"name": method} | ({"measure_share": 1.0} if method == "feddra" else {})


@pytest.mark.parametrize("method", ["fedaid", "feddra"])
def test_a_client_without_a_batch_does_no_harm(tmp_path: Path, method: str) -> None:
    session = session_of(tmp_path, **judged_whole(method))
    data = site_of(session).data_of(session.federation.members["hospital-2"])
    data.train = data.train.subset(torch.arange(1))
    play(session, 1, 2)
    assert not events(session)
    noted = metrics(session)
    assert "loss.hospital-2" not in noted
    assert noted["weight.hospital-2"] == 1 / 3
    assert all(bool(value.isfinite().all()) for value in global_model(session).values())


@pytest.mark.parametrize("method", ["fedaid", "feddra"])
def test_a_client_without_negatives_does_no_harm(tmp_path: Path, method: str) -> None:
    session = session_of(tmp_path, **judged_whole(method), optimizer={"kind": "adamw", "lr": 0.01})
    data = site_of(session).data_of(session.federation.members["hospital-2"])
    data.train = data.train.subset((data.train.items == data.train.items[0]).nonzero().flatten())  # of one image
    assert 1 < len(data.train) < 12
    play(session, 1, 2)
    assert not events(session)
    assert metrics(session)["loss.hospital-2"] == pytest.approx(0, abs=1e-6)
    assert metrics(session)["weight.hospital-2"] < 1 / 3
    assert all(bool(value.isfinite().all()) for value in global_model(session).values())


def test_clients_whose_weights_have_vanished(tmp_path: Path) -> None:
    """A cohort that holds nothing of w still gives a mean: uniform."""
    session = session_of(tmp_path, teacher={"weights": {"divergence": "none"}})
    zero = torch.zeros((), dtype=torch.float64)
    session.server.state["robust_weights"] = {CLIENTS[0]: zero + 1, CLIENTS[1]: zero, CLIENTS[2]: zero}
    cohort = first_cohort(session)
    cohort.clients = cohort.clients[1:]
    session.experiment.algorithm.round(session.server, cohort)
    assert all(bool(value.isfinite().all()) for value in global_model(session).values())
    assert [float(x) for x in session.server.state["robust_weights"].values()] == [1, 0, 0]


# ---- killed


class Dies(Callback):
    """Ends the run in round 2, after a client's step."""

    def __init__(self, step: str, client: str) -> None:
        self.at, self.round = (2, client, step), 0

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundStarted):
            self.round = event.round
        elif isinstance(event, ClientDone) and (self.round, event.client, event.step) == self.at:
            raise KeyboardInterrupt


def quiet(method: str = "fedaid", **algorithm: Any) -> Config:
    config = copy.deepcopy(aligned(**staged(1, name=method, **algorithm)))
    config["run"] |= {"evaluate_clients": False}
    return config


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Method -> what a run that nothing happens to leaves."""
    return {
        method: contents(
            polyfed.run(Experiment.parse(quiet(method)), tmp_path_factory.mktemp(method) / "run", quiet=True)
        )
        for method in ("fedaid", "feddra")
    }


@pytest.mark.parametrize(
    ("method", "step", "client"),
    [("fedaid", "judge", "hospital-2"), ("fedaid", "teach", "hospital-2"), ("feddra", "bind", "hospital-1")],
)
def test_a_run_killed_between_phases_resumes_to_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, dict[str, bytes]], method: str, step: str, client: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(Experiment.parse(quiet(method)), tmp_path / "run", [Dies(step, client)], quiet=True)
    assert contents(polyfed.resume(tmp_path / "run", quiet=True)) == undisturbed[method]
