"""CreamFL among averaged models: both halves by hand, and replies with too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from by_hand import assert_mean, copies, descend, naive_gca, plain_training, play, weights_of
from polyfed.algorithms.creamfl_averaged import CreamFLAveraged, StepContrast
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.core.errors import ExchangeError
from polyfed.data.samples import Batch
from polyfed.federation.cohort import ReplyPolicy
from polyfed.federation.settings import TrainingSettings
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations
from sessions import Excluded, crossing, first_cohort, of_samples, prepared, woken
from small_federations import Config, plain_sgd, sized, transformers

Tensors = dict[str, Tensor]
GAMMA = 10.0
ROWS, WIDTH = 30, 64  # of the public set: 6 images of 5 captions


@pytest.fixture
def config() -> Config:
    actual = sized(transformers(name="creamfl_averaged", contrast={"weight": 1.0, "batch_size": ROWS}), 48)
    actual["public"] = {"source": "scenes", "items": ROWS // 5}
    actual["clients"]["image"]["items"] = 24
    actual["clients"]["text"]["items"] = 48
    actual["clients"]["paired"]["items"] = 10
    return actual


# ---- by hand


def naive_contrasts(
    session: Session, client_id: str, start: Tensors, known: Representations
) -> Callable[[Model, Batch], Tensor]:
    """Equations 1 and 2 at temperature 0.5, summed over both, of the whole public set in the order of its passes."""
    client = woken(session, client_id)
    (modality,) = client.info.modalities
    (partner,) = [name for name in known if name != modality]
    client.load_weights(start)
    previous = client.represent(client.public_set)[modality].clone()
    passes = iter([client.public_batches(f"contrast-{k}", ROWS) for k in range(2)])

    def extra(model: Model, private: Batch) -> Tensor:
        (batch,) = next(passes)
        u, total = model.represent(modality, batch.inputs[modality]), torch.zeros(())
        for row, k in enumerate(batch.index.tolist()):
            logits = torch.stack([u[row] @ known[partner][j] for j in range(ROWS)]) / 0.5
            total = total + (logits.exp().sum().log() - logits[k]) / ROWS
            pair = torch.stack([u[row] @ known[modality][k], u[row] @ previous[k]]) / 0.5
            total = total + (pair.exp().sum().log() - pair[0]) / ROWS
        return GAMMA * total

    return extra


def trained_by_hand(session: Session, known: Representations) -> dict[str, Tensors]:
    """Two steps of every client."""
    server, actual = session.server, {}
    start = copies(server.weights)
    for info in server.clients:
        own = start[server.type_of(info)]
        extra = {} if len(info.modalities) > 1 else {"extra": naive_contrasts(session, info.id, own, known)}
        actual[info.id] = plain_training(session, info.id, own, step="contrasted_fit", **extra)
    return actual


def test_models_are_averaged_by_type_and_only_single_modalities_are_contrasted(config: Config, tmp_path: Path) -> None:
    config["algorithm"] |= {"distiller": None, "contrast": {"weight": GAMMA, "batch_size": ROWS}}
    config["clients"]["paired"]["items"] = 4
    session = prepared(plain_sgd(config, batch_size=12), tmp_path)
    server = session.server
    stream = torch.Generator().manual_seed(1)
    for value in (*server.weights["image"].values(), *server.weights["text"].values()):
        value += 0.1 * torch.randn(value.shape, generator=stream)  # previous and known representations then differ
    samples = {info.id: info.samples for info in server.clients}
    assert set(samples.values()) <= {10, 24}
    trained = trained_by_hand(session, server.represent_public())
    play(session, 1, 1)
    for form, members in server.types.items():
        assert_mean(server.weights[form], {info.id: trained[info.id] for info in members.clients}, samples)


def replies_of(session: Session, known: Tensors) -> tuple[dict[str, Tensors], dict[str, Tensor]]:
    """Client -> weights, and modality -> representations [clients, rows, d], asked one by one."""
    weights: dict[str, Tensors] = {}
    sent: dict[str, list[Tensor]] = {name: [] for name in known}
    for info in session.server.clients:
        noted = crossing(session, Representations(known if len(info.modalities) == 1 else {}))
        reply = session.experiment.algorithm.fit(woken(session, info.id), session.server.weights_for(info), noted)
        weights[info.id] = {name: value.clone() for name, value in reply.weights.items()}
        for modality, value in of_samples(session, reply.representations).items():
            sent[modality].append(value.double())
    return weights, {name: torch.stack(values) for name, values in sent.items()}


def distilled(session: Session, start: Tensors, targets: Tensors, rate: float) -> Tensors:
    """One pass of SGD on the mean squared error, summed over modalities, over the public set."""
    model = session.server.model
    model.load_state_dict(start)
    model.train()
    for batch in session.server.public_batches("distil-0", 16):
        errors = [model.represent(name, batch.inputs[name]) - targets[name][batch.index] for name in targets]
        descend(model, sum(error.square().mean() for error in errors), rate)
    return weights_of(model)


def test_the_averaged_paired_model_learns_what_single_modalities_sent(config: Config, tmp_path: Path) -> None:
    rate = 0.5
    optimizer = {"kind": "sgd", "lr": rate, "momentum": 0.0}
    config["algorithm"]["distiller"] = {"training": {"optimizer": optimizer, "batch_size": 16}}
    session, other = (prepared(plain_sgd(config, batch_size=12), tmp_path / name) for name in ("a", "b"))
    known = dict(session.server.represent_public())
    play(session, 1, 1)

    weights, sent = replies_of(other, known)
    assert {name: len(values) for name, values in sent.items()} == {"image": 1, "text": 2}
    partner = {"image": "text", "text": "image"}
    targets = {name: naive_gca(local, known[partner[name]].double()).float() for name, local in sent.items()}
    paired = {info.id: info.samples for info in session.server.clients if info.group == "paired"}
    mean = {
        name: sum(weights[client][name] * (samples / sum(paired.values())) for client, samples in paired.items())
        for name in session.server.model.state_dict()
    }
    expected = distilled(other, mean, targets, rate)
    for name, value in session.server.model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), name
        assert torch.equal(session.server.weights["paired"][name], value), name
    assert max(float((value - mean[name]).abs().max()) for name, value in expected.items()) > 1e-4


# ---- what crosses


def test_a_reply_with_more_than_was_asked_for_is_refused(config: Config, tmp_path: Path) -> None:
    session = prepared(config, tmp_path)
    cohort, refused = first_cohort(session), Excluded()
    packed = crossing(session, session.server.represent_public())
    cohort.listener, cohort.reply_policy = refused, lambda step: ReplyPolicy()

    def answered(request: Request) -> Answer:
        fields = {"weights": request.payload.fields["weights"], "representations": packed, "num_examples": 1}
        return Answer(request.client, Payload(fields))

    cohort.channel = replace(cohort.channel, exchange=lambda requests, deadline: map(answered, requests))
    with pytest.raises(ExchangeError, match="0 of 5 clients"):
        session.experiment.algorithm.round(session.server, cohort)
    assert all("representations of ['image', 'text'], expected" in reason for reason in refused.reasons.values())


# ---- settings


def test_defaults_are_those_of_fedcolas_paper() -> None:
    method = CreamFLAveraged()
    assert method.contrast == StepContrast(weight=1e-7, batch_size=128)
    adamw = TrainingSettings(optimizer=OptimizerSettings(kind="adamw", lr=1e-4, clip=2.0), batch_size=128)
    assert method.distiller == Distiller(loss="mse", weight=1.0, epochs=1, training=adamw)
