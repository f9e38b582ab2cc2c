"""FedDRA: two rounds of paper and released code by hand, what trains and crosses when, anchors."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_sessions import RATE, config_of, global_model, heard, parts_of, replies
from fedaid_by_hand import contrast, distance, seen, without_statistics
from torch import Tensor, nn

from by_hand import assert_close, assert_mean, copies, descend, furthest, model_of, play, weights_of
from polyfed.aggregation.robust import mirror_step
from polyfed.algorithms import feddra
from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.federation.state import unflatten
from polyfed.models.model import Model
from polyfed.runs.config_files import read_config
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Cause, Request
from polyfed.wire.payload import Weights as PayloadWeights
from sessions import metrics, prepared, round_records, site_of, watched, woken
from small_federations import participants

Values = dict[str, Tensor]
CLIENTS = ("hospital-0", "hospital-1")
SIDES = ("image", "text")
ROUNDED = 5e-4  # last bits of a processor, after two stages: measured 2.5e-4; weights move by more than 5e-3

STAGES = {"guidance", "weighted_stages", "weights", "aligner_in_stage_two", "measured_on", "frozen_encoder_mode"}
PRESET = read_config("feddra-mimic")["algorithm"]
RELEASED: Mapping[str, Any] = {key: PRESET[key] for key in sorted(STAGES)}  # tests/presets has each with its source


def session_of(folder: Path, count: int = 2, **algorithm: Any) -> Session:
    """Two batches of plain SGD in each stage, the contrast of the released code; losses are of all samples."""
    task = {"name": "convirt", "learn_temperature": False, "reduction": "sum"}
    config = copy.deepcopy(config_of(task=task, **{"name": "feddra", "measure_share": 1.0} | algorithm))
    config["algorithm"]["weights"] = {**config["algorithm"].get("weights", {}), "gamma": 5.0}
    config["clients"]["hospital"]["count"] = count
    return prepared(config, folder)


# ---- written out


def embedded(trunks: Model, aligners: Model, batch: Batch) -> Values:
    features = {side: trunks.encoders[side].trunk(batch.inputs[side]) for side in SIDES}
    return seen({side: aligners.encoders[side].aligner for side in SIDES}, features)


def itc(z: Values) -> Tensor:
    """CE(i2t) + CE(t2i) at temperature 0.07."""
    return 2 * contrast(z["image"], z["text"], 0.07, range(len(z["image"])))


def gap(z: Values, anchors: Values) -> Tensor:
    """Mean squared difference over elements, of both modalities."""
    return distance(z, anchors, "element")


def batches(session: Session, client: str, number: int, purpose: str) -> Iterator[Batch]:
    own = woken(session, client, (number, 0))
    return islice(own.batches(own.train, f"{purpose}-0"), 2)


def stage_one(
    session: Session, client: str, number: int, start: Values, teacher: Values, factor: float, released: bool
) -> Values:
    """Align modules and heads, on features of a frozen encoder.

    Released code: in training mode, and near the anchors of the last teacher.
    """
    model, still = model_of(session, client, start), model_of(session, client, {**start, **teacher})
    model.train()
    still.train(released).requires_grad_(False)
    with isolated(0, number, client, "align", 0):
        for batch in batches(session, client, number, "align"):
            z = embedded(still, model, batch)
            near = gap(z, embedded(still, still, batch)) if released else 0
            descend(model, factor * (itc(z) + near), RATE)
    return {name: start[name] if ".trunk." in name else value for name, value in weights_of(model).items()}


def stage_two(
    session: Session, client: str, number: int, own: Values, robust: Values, factor: float, guide: float
) -> Values:
    """Everything, from ``own``, near the anchors of encoder and robust aligner in training mode."""
    model, still = model_of(session, client, own), model_of(session, client, {**own, **robust})
    model.train()
    still.train()
    with isolated(0, number, client, "bind", 1):
        for batch in batches(session, client, number, "task"):
            z = embedded(model, model, batch)
            with torch.no_grad():
                anchors = embedded(still, still, batch)
            descend(model, factor * (itc(z) + guide * gap(z, anchors)), RATE)
    return weights_of(model)


@torch.no_grad()
def loss_by_hand(session: Session, client: str, number: int, weights: Values, layers: Values | None) -> float:
    """Contrast of a model in evaluation mode over whole batches of 12, and its distance to anchors of ``layers``."""
    model = model_of(session, client, weights).eval()
    own = woken(session, client, (number, 0))
    order, values = torch.randperm(len(own.train), generator=own.generator("measured")), []
    for chunk in order.split(12):
        if len(chunk) == 12:
            batch = own.train.batch(chunk)
            z, value = embedded(model, model, batch), 0.0
            if layers is not None:
                still = model_of(session, client, {**weights, **layers}).eval()
                value = float(gap(z, embedded(still, still, batch)))
            values.append(float(itc(z)) + value)
    return sum(values) / len(values)


def mean_of(models: Mapping[str, Values], like: Values, shares: Mapping[str, float]) -> Values:
    total = sum(shares.values())
    return {
        name: sum(shares[c] / total * model[name].double() for c, model in models.items()).to(value.dtype)
        for name, value in like.items()
    }


@pytest.mark.parametrize(
    ("settings", "guide", "released"),
    [
        ({}, 1.0, False),
        pytest.param({"guidance": {"weight": 5.0}}, 5.0, False, marks=pytest.mark.slow),
        pytest.param(RELEASED, 1.0, True, marks=pytest.mark.slow),
    ],
)
def test_two_rounds_equal_plain_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], guide: float, released: bool
) -> None:
    session = session_of(tmp_path, **settings)
    messages, names = heard(session, monkeypatch), parts_of(session).without_encoder
    teacher: Values = {}
    w = torch.full((2,), 0.5, dtype=torch.float64)
    for number in (1, 2):
        start = global_model(session)
        play(session, number, number)
        weights = dict(zip(CLIENTS, w.tolist(), strict=True))
        factors = {c: 2 * weights[c] if released else 1.0 for c in CLIENTS}
        first = {c: stage_one(session, c, number, start, teacher, factors[c], released) for c in CLIENTS}
        shares = dict.fromkeys(CLIENTS, 1.0) if released else weights
        robust = {name: value for name, value in mean_of(first, start, shares).items() if name in names}
        for client, reply in replies(messages, "align", number).items():
            assert_close(
                without_statistics(reply["weights"]), without_statistics({n: first[client][n] for n in names}), ROUNDED
            )
        received = {**start, **robust}
        second = {
            c: stage_two(session, c, number, first[c] if released else received, robust, factors[c], guide)
            for c in CLIENTS
        }
        for client, reply in replies(messages, "bind", number).items():
            assert_close(without_statistics(reply["weights"]), without_statistics(second[client]), ROUNDED)
            assert furthest(without_statistics(reply["weights"]), start) > 5e-3
        teacher = {name: value for name, value in robust.items() if ".aligner.layers." in name} if released else {}
        actual = global_model(session)
        sent = {c: reply["weights"] for c, reply in replies(messages, "bind", number).items()}
        assert_mean(actual, sent, dict.fromkeys(CLIENTS, 1.0))
        judged, layers = (actual, teacher) if released else (received, None)
        losses = [loss_by_hand(session, c, number, judged, layers) for c in CLIENTS]
        noted, divergence = metrics(session), "released" if released else "chi_square"
        assert [noted[f"loss.{c}"] for c in CLIENTS] == pytest.approx(losses, rel=1e-4)
        w = mirror_step(w, torch.tensor(losses, dtype=torch.float64), gamma=5.0, rho=1.0, divergence=divergence)
        assert [noted[f"weight.{c}"] for c in CLIENTS] == pytest.approx(w.tolist(), abs=1e-4)
        assert abs(float(w[0]) - 0.5) > 0.02


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
    session.experiment.algorithm.align(client, session.server.weights_for(client.info), PayloadWeights({}), 1.0)
    parts = parts_of(session)
    assert {name for name, actual in reached.items() if actual} == set(reached) & set(parts.aligner)
    after = client.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in parts.encoder)  # batch statistics too


def test_a_client_lost_between_the_stages_keeps_its_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, count=3)
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


# ---- anchors


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_equal_weights_are_at_distance_zero(tmp_path: Path, norm: str) -> None:
    """With batch norms in the heads too, which is FedDRA's default."""
    config = copy.deepcopy(config_of(name="feddra", guidance={"reduction": "mean"}, task_weight=0))
    for participant in participants(config):
        participant["model"] = copy.deepcopy(participant["model"])
        participant["model"]["aligner"] |= {"head_norm": norm}
        participant["model"]["encoders"]["text"] |= {"dropout": 0.0}
    session = prepared(config, tmp_path)
    client, algorithm = woken(session, CLIENTS[0]), session.experiment.algorithm
    client.load_weights(global_model(session))
    loss = algorithm.guided_loss(client)
    client.model.train()
    assert loss(client.model, next(client.batches(client.train, "x"))).item() == pytest.approx(0, abs=1e-9)


def test_the_anchors_keep_their_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage does not depend on how often anchors were computed."""
    session = session_of(tmp_path)
    client, algorithm = woken(session, CLIENTS[0]), session.experiment.algorithm
    client.load_weights(global_model(session))
    copies: list[nn.Module] = []
    freeze = feddra.frozen_copy
    monkeypatch.setattr(
        feddra, "frozen_copy", lambda module, **mode: copies.append(freeze(module, **mode)) or copies[-1]
    )
    loss = algorithm.guided_loss(client)
    before = {name: value.clone() for name, value in copies[0].named_buffers() if "running" in name}
    client.model.train()
    loss(client.model, next(client.batches(client.train, "x")))
    after = dict(copies[0].named_buffers())
    assert before
    assert all(torch.equal(value, after[name]) for name, value in before.items())
