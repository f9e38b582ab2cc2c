"""FedDRA: a round of two clients by hand, what trains when, weights of the next round, its settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_sessions import heard, parts_of, replies
from fedaid_by_hand import Known
from torch import Tensor

from by_hand import assert_mean, copies, descend, model_of, play, weights_of
from polyfed.aggregation.robust import mirror_step
from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.federation.state import unflatten
from polyfed.models.model import Model
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Cause, Request
from polyfed.wire.payload import Weights as PayloadWeights
from sessions import metrics, prepared, round_records, site_of, watched, woken
from small_federations import aligned

Values = dict[str, Tensor]
RATE = 0.05
CLIENTS = ("hospital-0", "hospital-1")


def session_of(folder: Path, count: int = 2, **algorithm: Any) -> Session:
    """Two batches of plain SGD in each stage; losses are of all samples."""
    config = copy.deepcopy(
        aligned(**{"name": "feddra", "local_steps": 2, "robust_steps": 2, "measure_share": 1.0} | algorithm)
    )
    config["clients"]["hospital"]["count"] = count
    sgd = {"kind": "sgd", "lr": RATE, "momentum": 0.0, "clip": None}
    config["clients"]["hospital"]["training"]["optimizer"] = sgd
    return prepared(config, folder)


# ---- written out


def units(model: Model, trunks: Model, batch: Batch) -> Values:
    """Unit vectors of the features of ``trunks`` under the align modules of ``model``."""
    features = {name: trunks.encoders[name].trunk(x) for name, x in batch.inputs.items()}
    values = {name: model.encoders[name].aligner(actual) for name, actual in features.items()}
    return {name: value / value.norm(dim=1, keepdim=True) for name, value in values.items()}


def task_loss(session: Session, client: str, model: Model, values: Values, batch: Batch) -> Tensor:
    member = session.federation.members[client]
    loss: Tensor = member.settings.task.loss(Known(values), model.heads[member.head], batch)  # type: ignore[arg-type]
    return loss


def batches(session: Session, client: str, purpose: str) -> Iterator[Batch]:
    own = woken(session, client)
    return islice(own.batches(own.train, f"{purpose}-0"), 2)


def aligned_by_hand(session: Session, client: str, start: Values) -> Values:
    """Stage 1: the features are those of a frozen encoder in evaluation mode."""
    model, still = model_of(session, client, start), model_of(session, client, start).eval().requires_grad_(False)
    model.train()
    with isolated(0, 1, client, "align", 0):
        for batch in batches(session, client, "align"):
            descend(model, task_loss(session, client, model, units(model, still, batch), batch), RATE)
    return weights_of(model)


def bound_by_hand(session: Session, client: str, start: Values, guide: float = 1.0) -> Values:
    """Stage 2: task and the mean squared difference, over elements, to what the received model gives in its mode."""
    model, still = model_of(session, client, start), model_of(session, client, start)
    model.train()
    still.train()
    with isolated(0, 1, client, "bind", 1):
        for batch in batches(session, client, "task"):
            z = units(model, model, batch)
            with torch.no_grad():
                targets = units(still, still, batch)
            gaps = [sum((a - b) ** 2 for a, b in zip(z[n].flatten(), targets[n].flatten(), strict=True)) for n in z]
            means = [gap / z[name].numel() for gap, name in zip(gaps, z, strict=True)]
            descend(model, guide * sum(means) + task_loss(session, client, model, z, batch), RATE)
    return weights_of(model)


@torch.no_grad()
def loss_by_hand(session: Session, client: str, weights: Values) -> float:
    model = model_of(session, client, weights).eval()
    own, total = woken(session, client), 0.0
    order = torch.randperm(len(own.train), generator=own.generator("measured"))
    chunks = [chunk for chunk in order.split(12) if len(chunk) == 12]
    for chunk in chunks:
        batch = own.train.batch(chunk)
        total += len(chunk) * float(task_loss(session, client, model, units(model, model, batch), batch))
    return total / sum(map(len, chunks))


@pytest.mark.parametrize("guide", [1.0, 5.0])
def test_a_round_of_two_clients_by_hand(tmp_path: Path, guide: float) -> None:
    session = session_of(tmp_path, guidance={"weight": guide})
    start, names = copies(session.server.weights)["hospital"], parts_of(session).without_encoder
    play(session, 1, 1)
    stage_one = {client: aligned_by_hand(session, client, start) for client in CLIENTS}
    robust = {name: sum(0.5 * stage_one[client][name].double() for client in CLIENTS) for name in names}
    received = start | {name: value.to(start[name].dtype) for name, value in robust.items()}
    stage_two = {client: bound_by_hand(session, client, received, guide) for client in CLIENTS}
    actual = copies(session.server.weights)["hospital"]
    assert_mean(actual, stage_two, dict.fromkeys(CLIENTS, 1.0), tolerance=1e-3)  # fp32: a ReLU at 0 may flip
    assert max(float((actual[name] - start[name]).abs().max()) for name in parts_of(session).encoder) > 0.01
    assert max(float((received[name] - start[name]).abs().max()) for name in parts_of(session).aligner) > 0.01
    alone = bound_by_hand(session, CLIENTS[0], received, 0.0)
    assert max(float((alone[name] - stage_two[CLIENTS[0]][name]).abs().max()) for name in names) > 1e-3
    losses = torch.tensor([loss_by_hand(session, client, received) for client in CLIENTS], dtype=torch.float64)
    w = mirror_step(torch.ones(2), losses, gamma=0.5, rho=1.0)
    noted = metrics(session)
    assert [noted[f"loss.{client}"] for client in CLIENTS] == pytest.approx(losses.tolist(), rel=1e-4)
    assert [noted[f"weight.{client}"] for client in CLIENTS] == pytest.approx(w.tolist(), rel=1e-4)
    assert noted["worst_loss"] == pytest.approx(float(losses.max()), rel=1e-4)
    assert abs(float(w[0]) - 0.5) > 1e-4


# ---- what trains, what crosses


def test_encoders_rest_in_the_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path)
    start, parts, exchanged = copies(session.server.weights)["hospital"], parts_of(session), heard(session, monkeypatch)
    play(session, 1, 1)
    messages = {(one.step, one.client): (one.sent, one.reply) for one in exchanged}
    for client in CLIENTS:
        sent, reply = messages["align", client]
        assert set(sent["weights"]) == set(start)
        assert set(reply) == {"weights"}
        assert set(reply["weights"]) == set(parts.without_encoder)
        assert any(not torch.equal(value, start[name]) for name, value in reply["weights"].items())
        sent, reply = messages["bind", client]
        assert set(sent) == {"aligner", "factor"}
        assert set(sent["aligner"]) == set(parts.without_encoder)
        assert set(reply) == {"weights", "num_examples", "loss"}
        assert any(not torch.equal(reply["weights"][name], start[name]) for name in parts.encoder)
        assert not unflatten(site_of(session).store.load(client, session.cohorts.accepted[client]))  # nothing stays


def test_gradients_of_the_first_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path)
    client = woken(session, CLIENTS[0])
    reached: dict[str, bool] = {}

    def fit(samples: Any, *, regulariser: Any, **remainder: Any) -> int:
        client.model.train()
        regulariser(client.model, next(client.batches(samples, "x"))).backward()
        reached.update({name: value.grad is not None for name, value in client.model.named_parameters()})
        return 1

    monkeypatch.setattr(client, "fit", fit)
    before = copies(session.server.weights)["hospital"]
    algorithm = session.experiment.algorithm
    algorithm.align(client, session.server.weights_for(client.info), PayloadWeights({}), 1.0)
    parts = parts_of(session)
    assert {name for name, actual in reached.items() if actual} == set(reached) & set(parts.aligner)
    after = client.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in parts.encoder)  # batch statistics too


# ---- weights


def test_weights_of_a_round_serve_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, weights={"gamma": 20.0})
    exchanged = heard(session, monkeypatch)
    play(session, 1, 1)
    w = {client: float(session.server.state["robust_weights"][client]) for client in CLIENTS}
    assert abs(w[CLIENTS[0]] - 0.5) > 0.02
    play(session, 2, 2)
    for number, shares in ((1, dict.fromkeys(CLIENTS, 0.5)), (2, w)):
        trained = {client: reply["weights"] for client, reply in replies(exchanged, "align", number).items()}
        robust = next(one.sent["aligner"] for one in exchanged if (one.round, one.step) == (number, "bind"))
        assert_mean(robust, trained, shares)
    noted = metrics(session)
    losses = torch.tensor([noted[f"loss.{client}"] for client in CLIENTS], dtype=torch.float64)
    expected = mirror_step(torch.tensor(list(w.values())), losses, gamma=20.0, rho=1.0)
    assert [noted[f"weight.{client}"] for client in CLIENTS] == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_client_lost_between_the_stages_keeps_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, count=3, weights={"gamma": 5.0})
    lost = "hospital-1"

    def lose(one: Request, answer: Answer) -> Answer:
        is_lost = (one.client, one.round, one.step) == (lost, 1, "bind")
        return Answer.failed(lost, Cause.LOST, "the line broke") if is_lost else answer

    watched(session, monkeypatch, lose)
    play(session, 1, 1)
    assert [record["participant"] for record in round_records(session) if record["kind"] == "event"] == [lost]
    assert metrics(session)[f"weight.{lost}"] == 1 / 3
    assert f"loss.{lost}" not in metrics(session)
    play(session, 2, 2)
    assert f"loss.{lost}" in metrics(session)


def test_the_ledger_has_the_bytes_of_the_payloads(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    model, parts, ledger = copies(session.server.weights)["hospital"], parts_of(session), Ledger()
    session.experiment.algorithm.round(session.server, session.cohort(1, ledger))
    full, remainder = (sum(model[name].nbytes for name in names) for names in (model, parts.without_encoder))
    expected = {("align", "down"): full, ("align", "up"): remainder, ("bind", "down"): remainder, ("bind", "up"): full}
    lines = [line for line in ledger.records if line["kind"] == "weights" and line["bytes"]]  # no teacher in round 1
    assert len(lines) == 4 * len(CLIENTS)
    assert all(line["bytes"] == expected[line["step"], line["direction"]] for line in lines)
