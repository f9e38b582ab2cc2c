"""Schedules by epoch: every training loop of every method uses the rates of its schedule."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer

from by_hand import play
from grids import mostly_slow
from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.settings import Settings
from polyfed.federation import trainer
from polyfed.federation.settings import TrainingSettings
from polyfed.optim.settings import OptimizerSettings
from sessions import prepared
from small_federations import METHODS, Config, federation_for

SCHEDULE = {"kind": "exponential", "decay": 0.5, "unit": "epoch"}
EPOCHS = 3
IN_STEPS = {"fedaid", "feddra"}
"""Methods one of whose stages is a number of batches, which count as one epoch."""


def by_epochs(method: str, epochs: int) -> Config:
    """The method's federation with so many epochs in every loop, and a schedule by epochs for every optimiser."""
    fields = Algorithm.named(method).model_fields
    settings: Config = {name: epochs for name in fields if name.endswith("_epochs")}
    settings |= {name: None for name in fields if name == "local_steps"}
    for name, field in fields.items():
        if isinstance(field.default, Settings):
            settings[name] = _in_epochs(field.default, epochs)
    config = federation_for(method, **settings)
    for participant in (*config["clients"].values(), *([config["server"]] if "server" in config else [])):
        participant["training"] = dict(participant.get("training", {})) | {"schedule": SCHEDULE}
    return config


def _in_epochs(section: Settings, epochs: int) -> Config:
    """The content of a section with so many epochs and with schedules; a joint task has those of the distillation."""
    content = section.model_dump(mode="json")
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name == "epochs" and getattr(section, "order", "") != "joint":
            content[name] = epochs
        elif name == "steps":
            content[name] = epochs  # of so many batches
        elif isinstance(value, TrainingSettings):
            content[name] |= {"schedule": SCHEDULE}
    return content | ({"schedule": SCHEDULE} if isinstance(section, TrainingSettings) else {})


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Factors on the rate of every optimiser that is built, step by step."""
    make, used = trainer._optimizer, list[list[float]]()

    def spied(model: Any, settings: OptimizerSettings, parameters: Any) -> Optimizer:
        optimizer, factors = make(model, settings, parameters), list[float]()
        used.append(factors)
        optimizer.register_step_pre_hook(lambda *_: factors.append(optimizer.param_groups[0]["lr"] / settings.lr))
        return optimizer

    monkeypatch.setattr(trainer, "_optimizer", spied)
    return used


QUICK = {"centralised", "creamfl", "fedaid", "fedavg", "fedgems", "fedmd", "server_only"}
"""Methods that between them have every kind of loop over epochs; the others, which have the same loops, are slow."""


@pytest.mark.parametrize("method", mostly_slow(METHODS, *QUICK))
def test_rates_follow_the_schedule_by_epoch(tmp_path: Path, used: list[list[float]], method: str) -> None:
    """Factors on the rate of every optimiser in both rounds: 1 and 1/2, then 1/4 and 1/8, in each loop."""
    session = prepared(by_epochs(method, 2), tmp_path)
    for number, (first, second) in ((1, (1, 0.5)), (2, (0.25, 0.125))):
        used.clear()
        play(session, number, number)
        stages = {_stages(factors) for factors in used if factors}
        assert stages, "nothing was trained"
        loops = stages - ({(first,)} if method in IN_STEPS else set())
        assert loops
        for factors in loops:
            assert list(factors) == [first, second] * (len(factors) // 2)


def test_loops_of_any_length_begin_where_the_local_epochs_do(tmp_path: Path, used: list[list[float]]) -> None:
    config = by_epochs("fedmd", EPOCHS)
    config["algorithm"] |= {"digest": {"epochs": 2}, "task": {"epochs": 2}}
    config["algorithm"]["distiller"] = {"epochs": 4}
    session = prepared(config, tmp_path)
    play(session, 1, 1)
    used.clear()
    play(session, 2, 2)
    begun = 0.5**EPOCHS  # of clients: the digest, then the revisit
    of = {length: tuple(begun * 0.5**epoch for epoch in range(length)) for length in (2, 3, 4)}
    assert {_stages(factors) for factors in used if factors} == {
        of[2],
        of[4],
        of[2] + of[3],
    }  # the digest, then the revisit


def _stages(factors: list[float]) -> tuple[float, ...]:
    """Factors in order, without repetitions in a row."""
    return tuple(round(factor, 12) for factor, _ in itertools.groupby(factors))
