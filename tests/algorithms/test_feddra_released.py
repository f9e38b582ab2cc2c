"""FedDRA as its released code trains: both stages, losses and weights of two rounds, written out as plain loops."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_sessions import RATE, assert_close, config_of, furthest, global_model, heard, parts_of, replies
from fedaid_by_hand import without_statistics
from torch import Tensor, nn

from by_hand import assert_mean, descend, model_of, play, weights_of
from polyfed.aggregation.robust import mirror_step
from polyfed.algorithms import feddra
from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.models.model import Model
from polyfed.runs.config_files import read_config
from polyfed.runs.session import Session
from sessions import metrics, prepared, woken

Values = dict[str, Tensor]
CLIENTS = ("hospital-0", "hospital-1")
SIDES = ("image", "text")
ROUNDED = 5e-4  # last bits of a processor, after two stages: measured 2.5e-4; weights move by more than 5e-3

STAGES = {"guidance", "weighted_stages", "weights", "aligner_in_stage_two", "measured_on", "frozen_encoder_mode"}
PRESET = read_config("feddra-mimic")["algorithm"]
RELEASED: Mapping[str, Any] = {key: PRESET[key] for key in sorted(STAGES)}  # tests/presets has each with its source


def session_of(folder: Path, **algorithm: Any) -> Session:
    """Two clients, two batches of plain SGD in each stage, the contrast of the released code."""
    task = {"name": "convirt", "learn_temperature": False, "reduction": "sum"}
    config = copy.deepcopy(config_of(task=task, **{"name": "feddra", "measure_share": 1.0} | algorithm))
    config["algorithm"]["weights"] = {**config["algorithm"].get("weights", {}), "gamma": 5.0}
    config["clients"]["hospital"]["count"] = len(CLIENTS)
    return prepared(config, folder)


# ---- written out


def unit(aligner: nn.Module, features: Any) -> Tensor:
    value: Tensor = aligner(features)
    return value / value.norm(dim=1, keepdim=True)


def embedded(trunks: Model, aligners: Model, batch: Batch) -> Values:
    features = {side: trunks.encoders[side].trunk(batch.inputs[side]) for side in SIDES}
    return {side: unit(aligners.encoders[side].aligner, features[side]) for side in SIDES}


def itc(z: Values) -> Tensor:
    """CE(i2t) + CE(t2i) at temperature 0.07."""
    scores = z["image"] @ z["text"].T / 0.07
    both = [row.logsumexp(0) - row[i] for side in (scores, scores.T) for i, row in enumerate(side)]
    return torch.stack(both).sum() / len(scores)


def gap(z: Values, anchors: Values) -> Tensor:
    """Mean squared difference over elements, of both modalities."""
    return torch.stack([((z[side] - anchors[side]) ** 2).sum() / z[side].numel() for side in SIDES]).sum()


def batches(session: Session, client: str, number: int, purpose: str) -> Iterator[Batch]:
    own = woken(session, client, (number, 0))
    return islice(own.batches(own.train, f"{purpose}-0"), 2)


def stage_one(session: Session, client: str, number: int, start: Values, teacher: Values, factor: float) -> Values:
    """Align modules and heads, on features of an encoder in training mode, near the anchors of the last teacher."""
    model, still = model_of(session, client, start), model_of(session, client, {**start, **teacher})
    model.train()
    still.train()
    encoder = {name for name, _ in model.named_parameters() if ".trunk." in name}
    for name, value in model.named_parameters():
        value.requires_grad_(name not in encoder)
    with isolated(0, number, client, "align", 0):
        for batch in batches(session, client, number, "align"):
            z = embedded(still, model, batch)
            with torch.no_grad():
                anchors = embedded(still, still, batch)
            descend(model, factor * (itc(z) + gap(z, anchors)), RATE)
    trained = weights_of(model)
    return {name: start[name] if ".trunk." in name else value for name, value in trained.items()}


def stage_two(session: Session, client: str, number: int, own: Values, robust: Values, factor: float) -> Values:
    """Everything, from the client's own aligner, near the anchors of encoder and robust aligner in training mode."""
    model, still = model_of(session, client, own), model_of(session, client, {**own, **robust})
    model.train()
    still.train()
    with isolated(0, number, client, "bind", 1):
        for batch in batches(session, client, number, "task"):
            z = embedded(model, model, batch)
            with torch.no_grad():
                anchors = embedded(still, still, batch)
            descend(model, factor * (itc(z) + gap(z, anchors)), RATE)
    return weights_of(model)


@torch.no_grad()
def loss_by_hand(session: Session, client: str, number: int, weights: Values, layers: Values) -> float:
    """ITC and distance of the aggregated model to its anchors, in evaluation mode, over whole batches of 12."""
    model, still = model_of(session, client, weights).eval(), model_of(session, client, {**weights, **layers}).eval()
    own = woken(session, client, (number, 0))
    order, values = torch.randperm(len(own.train), generator=own.generator("measured")), []
    for chunk in order.split(12):
        if len(chunk) == 12:
            batch = own.train.batch(chunk)
            z = embedded(model, model, batch)
            values.append(float(itc(z) + gap(z, embedded(still, still, batch))))
    return sum(values) / len(values)


def mean_of(models: Mapping[str, Values], like: Values) -> Values:
    return {
        name: (sum(model[name].double() for model in models.values()) / len(models)).to(value.dtype)  # type: ignore[union-attr]
        for name, value in like.items()
    }


def layers_of(values: Values) -> Values:
    return {name: value for name, value in values.items() if ".aligner.layers." in name}


@pytest.mark.slow
def test_two_released_rounds_equal_plain_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, **RELEASED)
    messages, names = heard(session, monkeypatch), parts_of(session).without_encoder
    teacher: Values = {}
    w = torch.full((2,), 0.5, dtype=torch.float64)
    for number in (1, 2):
        start = global_model(session)
        play(session, number, number)
        factors = dict(zip(CLIENTS, (2 * w).tolist(), strict=True))
        first = {c: stage_one(session, c, number, start, teacher, factors[c]) for c in CLIENTS}
        robust = {name: value for name, value in mean_of(first, start).items() if name in names}
        for client, reply in replies(messages, "align", number).items():
            assert_close(
                without_statistics(reply["weights"]), without_statistics({n: first[client][n] for n in names}), ROUNDED
            )
        second = {c: stage_two(session, c, number, first[c], robust, factors[c]) for c in CLIENTS}
        for client, reply in replies(messages, "bind", number).items():
            assert_close(without_statistics(reply["weights"]), without_statistics(second[client]), ROUNDED)
            assert furthest(without_statistics(reply["weights"]), start) > 5e-3
        teacher = layers_of(robust)
        actual = global_model(session)
        sent = {c: reply["weights"] for c, reply in replies(messages, "bind", number).items()}
        assert_mean(actual, sent, dict.fromkeys(CLIENTS, 1.0))
        losses = [loss_by_hand(session, c, number, actual, teacher) for c in CLIENTS]
        noted = metrics(session)
        assert [noted[f"loss.{c}"] for c in CLIENTS] == pytest.approx(losses, rel=1e-4)
        w = mirror_step(w, torch.tensor(losses, dtype=torch.float64), gamma=5.0, rho=1.0, divergence="released")
        assert [noted[f"weight.{c}"] for c in CLIENTS] == pytest.approx(w.tolist(), abs=1e-4)
        assert abs(float(w[0]) - 0.5) > 0.02


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_equal_weights_are_at_distance_zero(tmp_path: Path, norm: str) -> None:
    """With batch norms in the heads too, which is FedDRA's default."""
    config = copy.deepcopy(config_of(name="feddra", guidance={"reduction": "mean"}, task_weight=0))
    for participant in (config["server"], config["clients"]["hospital"]):
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
