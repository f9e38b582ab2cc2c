"""Every method trains with its optimisers: all clients reply usably, and the models of all move."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from by_hand import as_left, copies, play
from polyfed.federation.settings import TrainingSettings
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from sessions import prepared, round_records, woken
from small_federations import ADAPTED, METHODS, NAMED, Config, federation_for, participants

FORMS: dict[str, Config] = {method: {} for method in METHODS} | {
    "change_distillation:gradient": {"digest": {"by": "gradient"}, "linear": True},
    "fedafd:alternate": {"adversarial": {"update": "alternate"}},
    "fedmd:digest": {"digest": {"epochs": 1}},
}
"""Methods with their defaults, and forms in which some parameters get their first gradient in a later step."""
OPTIMIZERS: dict[str, Config] = {
    "sgd": {"kind": "sgd", "weight_decay": 0.01},
    "sgd-clipped": {"kind": "sgd", "clip": 1.0},
    "sgd-plain": {"kind": "sgd", "momentum": 0.0},
    "adam": {"kind": "adam", "clip": 1.0},
    "adamw": {"kind": "adamw", "weight_decay": 0.01},
    "adamp": {"kind": "adamp", "weight_decay": 0.01},
}
THROUGHOUT = {"fedavg"}
"""With every optimiser."""
IN_TURN = {"fedmd:digest", "fedafd:alternate"}
"""With two: two loops in turn; two optimisers over parts of a model."""
COSTLY = {"creamfl_averaged", "fed_mae", "fedaid", "fedcola", "feddra", "fedema", "fediot", "fedprox", *ADAPTED, *NAMED}
COSTLY = COSTLY - {"fedit"} | {"change_distillation", "fedafd", "fedet", "fedgems", "fedmd", "fedmkd", "moon"}
"""Slow: they step once per batch over all that trains, as ``fedavg`` and ``fedit`` do, or take seconds."""


def cases() -> Iterator[Any]:
    """Every method with momentum; three with other optimisers, of which all but AdamP are slow."""
    for form, optimizer in itertools.product(FORMS, OPTIMIZERS):
        if form in THROUGHOUT or optimizer == "sgd" or (form in IN_TURN and optimizer == "adamp"):
            marks = pytest.mark.slow if form in COSTLY or optimizer not in ("sgd", "adamp") else ()
            yield pytest.param(form, optimizer, marks=marks, id=f"{form}-{optimizer}")


@pytest.mark.parametrize(("form", "optimizer"), list(cases()))
def test_all_reply_and_all_move(form: str, optimizer: str, tmp_path: Path) -> None:
    session = prepared(_config(form, OPTIMIZERS[optimizer] | {"lr": 0.01}), tmp_path)
    before = _parameters(session)
    for number in (1, 2):
        play(session, number, number)
        assert not [record for record in round_records(session) if record["kind"] == "event"]
    after = _parameters(session)
    assert all(value.isfinite().all() for tensors in after.values() for value in tensors.values())
    assert not {owner for owner in after if not _moved(before[owner], after[owner])}


def _config(form: str, optimizer: Config) -> Config:
    """Participants, and the trainings that a method has of its own, with this optimiser."""
    config = federation_for(form.split(":")[0], **FORMS[form])
    for participant in participants(config):
        participant["training"] = {"optimizer": optimizer, "batch_size": 8}
    algorithm = Experiment.parse(config).algorithm
    fields = type(algorithm).model_fields
    trainings = [name for name in fields if isinstance(getattr(algorithm, name), TrainingSettings)]
    config["algorithm"] |= {name: {"optimizer": optimizer} for name in trainings}
    return config


def _parameters(session: Session) -> dict[str, dict[str, Tensor]]:
    """Tensors of the server's model, of the global models by type, and of clients that keep a model or a part."""
    server, groups = session.server, dict[str, dict[str, Tensor]]()
    for client in session.server.clients if "model" in session.experiment.algorithm.keeps else ():
        model = (as_left if client.id in session.cohorts.accepted else woken)(session, client.id).model
        names = {name for name, _ in model.named_parameters()}
        groups |= copies({client.id: {name: value for name, value in model.state_dict().items() if name in names}})
    if server.has_model and session.experiment.algorithm.component_name() != "local":  # it trains no server
        groups |= copies({"server": dict(server.model.named_parameters())})
    return groups | copies({f"global {type_name}": dict(tensors) for type_name, tensors in server.weights.items()})


def _moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    return any(not value.equal(after[name]) for name, value in before.items())
