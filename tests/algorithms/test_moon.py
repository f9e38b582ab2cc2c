"""MOON: two rounds by hand, and what trains."""

from __future__ import annotations

import copy
from itertools import chain, count, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import RATE, assert_mean, copies, descend, model_of, play, weights_of
from polyfed.core.randomness import isolated
from polyfed.models.model import CachedModel, Model
from polyfed.runs.session import Session
from sessions import first_cohort, prepared, woken
from small_federations import Config, in_steps, plain_sgd, transformers

Weights = dict[str, Tensor]


@pytest.fixture(params=["tiny", pytest.param("transformers", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tiny: Config) -> Config:
    config = tiny if request.param == "tiny" else transformers()
    config["algorithm"] = {"name": "moon", "local_epochs": 1, "mu": 5.0}
    return config


def by_hand(session: Session, name: str, start: Weights, number: int, previous: Weights | None) -> Weights:
    """Two steps of SGD in a round on the task, and on 5 x l_con written as the paper does."""
    member = session.federation.members[name]
    model = model_of(session, name, start)
    received, before = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    before.load_state_dict(previous or start)
    client = woken(session, name, (number, 0))
    model.train()
    with isolated(0, number, name, "fit", 0):
        passes = (client.batches(client.train, f"task-{number}") for number in count())
        for batch in islice(chain.from_iterable(passes), 2):
            once = CachedModel(model)
            loss = member.settings.task.loss(once, model.heads[member.head], batch)
            for modality, x in batch.inputs.items() if previous else ():
                z = projected(model, modality, once.embed(modality, x))
                with torch.no_grad():
                    g, p = (projected(other, modality, other.embed(modality, x)) for other in (received, before))
                towards, away = (F.cosine_similarity(z, other).div(0.5).exp() for other in (g, p))
                loss = loss - 5.0 * (towards / (towards + away)).log().mean()
            descend(model, loss, RATE)
    return weights_of(model)


def projected(model: Model, modality: str, embedding: Tensor) -> Tensor:
    head = f"projection_{modality}"
    return model.extras[head](embedding) if head in model.extras else embedding


@pytest.mark.parametrize("projection", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_two_rounds_equal_a_plain_loop(config: Config, tmp_path: Path, projection: int | None) -> None:
    config["algorithm"] = in_steps(config["algorithm"] | {"projection": projection}, 2)
    session = prepared(plain_sgd(config), tmp_path)
    server, kept = session.server, {}
    for number in (1, 2):
        start = copies(server.weights)
        play(session, number, number)
        for type_name, members in server.types.items():
            names = [info.id for info in members.clients]
            trained = {name: by_hand(session, name, start[type_name], number, kept.get(name)) for name in names}
            assert_mean(server.weights[type_name], trained, {info.id: info.samples for info in members.clients})
            kept |= trained
    heads = [name for name in server.weights["paired"] if name.startswith("extras.") and name.endswith("weight")]
    assert len(heads) == (4 if projection else 0)
    assert not any(torch.equal(server.weights["paired"][name], start["paired"][name]) for name in heads)


def test_encoders_run_once_per_batch_and_frozen_models_learn_nothing(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = {"name": "moon", "local_epochs": 1}
    session = prepared(tiny, tmp_path)
    algorithm = session.experiment.algorithm
    algorithm.round(session.server, first_cohort(session))
    client = woken(session, "paired-0", (2, 0), after=(1, 0))
    client.load_weights(session.server.weights["paired"])
    modes: list[bool] = []
    client.model.encoders["image"].register_forward_hook(lambda module, *_: modes.append(module.training))
    regulariser = algorithm.contrast(client)  # copies take the hook with them
    assert regulariser is not None
    client.fit(client.train, epochs=1, steps=2, regulariser=regulariser)
    client.model.encoders["image"]._forward_hooks.clear()
    assert modes == [True, False, False] * 2
