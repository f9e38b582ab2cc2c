"""Schedules by epoch: every training loop of every method uses the rates that its schedule says."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer

from by_hand import play
from every_method import METHODS, federation_for
from polyfed.algorithms.algorithm import Algorithm
from polyfed.federation.settings import TrainingSettings
from polyfed.optim.settings import OptimizerSettings
from sessions import prepared

Config = dict[str, Any]
SCHEDULE = {"kind": "exponential", "decay": 0.5, "unit": "epoch"}
EPOCHS, ROUNDS = 3, 2
IN_STEPS = {"fedaid", "feddra"}
"""Methods one of whose stages is a number of batches, which count as one epoch."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))


def by_epochs(method: str) -> Config:
    """The method's federation with three epochs in every loop, and a schedule by epochs for every optimiser."""
    fields = Algorithm.named(method).model_fields
    unset = {"first_public_epochs"} | ({"server_epochs"} if method == "fedgems" else set())
    settings: Config = {name: EPOCHS for name in fields if name.endswith("_epochs") and name not in unset}
    settings |= {name: None for name in fields if name == "local_steps"}
    for name, field in fields.items():
        if isinstance(field.default, TrainingSettings):
            settings[name] = field.default.model_dump(mode="json") | {"schedule": SCHEDULE}
    config = federation_for(method, **settings)
    for party in (*config["clients"].values(), *([config["server"]] if "server" in config else [])):
        party["training"] = dict(party.get("training", {})) | {"schedule": SCHEDULE}
    return config


@pytest.mark.parametrize("method", METHODS)
def test_rates_follow_the_schedule_by_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Of every optimiser, the factors on its rate in both rounds: 1, 1/2, 1/4, then 1/8, 1/16, 1/32, in each loop."""
    build, used = OptimizerSettings.build, list[list[float]]()

    def spied(self: OptimizerSettings, parameters: Any) -> Optimizer:
        optimizer, factors = build(self, parameters), list[float]()
        used.append(factors)
        optimizer.register_step_pre_hook(lambda *_: factors.append(optimizer.param_groups[0]["lr"] / self.lr))
        return optimizer

    monkeypatch.setattr(OptimizerSettings, "build", spied)
    session = prepared(by_epochs(method), tmp_path)
    for number in range(1, ROUNDS + 1):
        used.clear()
        play(session, number, number)
        begun = 0.5 ** (EPOCHS * (number - 1))
        wanted = [begun * 0.5**epoch for epoch in range(EPOCHS)]
        stages = {_stages(factors) for factors in used if factors}
        assert stages, "nothing was trained"
        once = {(0.5 ** (number - 1),)} if method in IN_STEPS else set()
        loops = stages - once
        assert loops
        for factors in loops:
            assert list(factors) == wanted * (len(factors) // EPOCHS), method


def _stages(factors: list[float]) -> tuple[float, ...]:
    """Factors in order, without repetitions in a row."""
    return tuple(round(factor, 12) for factor, _ in itertools.groupby(factors))
