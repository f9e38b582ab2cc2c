"""Trainers of one live model, one after the other and at once: none sees what another left in its optimiser."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock, Epochs, Trainer
from polyfed.models.model import Layout
from polyfed.optim.settings import OptimizerSettings

Kind = Literal["adamp", "adamw", "adam", "sgd"]
KINDS: tuple[Kind, ...] = ("adamp", "adamw", "adam", "sgd")


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trainer_of(part: nn.Module, settings: OptimizerSettings, only: Any = None) -> Trainer:
    return Trainer(part, TrainingSettings(optimizer=settings), Clock(0, 1, 1), Epochs(), only)


def train(trainer: Trainer, part: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Values of all tensors after some steps from the same start."""
    part.load_state_dict(model().state_dict())
    for number in trainer._epochs.through(steps):
        trainer.step(part(torch.full((2, 3), 1.0 + number)).square().sum())
    return [value.detach().clone() for value in part.parameters()]


@pytest.mark.parametrize("optimizer", KINDS)
def test_a_second_trainer_learns_as_the_first(optimizer: Kind) -> None:
    part, settings = model(), OptimizerSettings(kind=optimizer, lr=0.1, weight_decay=0.1)
    first, second = trainer_of(part, settings), trainer_of(part, settings)
    first.optimizer.register_step_post_hook(lambda *_: pytest.fail("the hook of another"))
    other = model()
    expected = train(trainer_of(other, settings), other)
    assert all(map(torch.equal, train(second, part), expected))
    second.optimizer.param_groups[0]["weight_decay"] = 5.0
    kept = second.state()
    third = trainer_of(part, settings)
    assert not third.state()
    assert all(map(torch.equal, train(third, part), expected))
    third.load(kept)
    assert third.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_trainers_of_different_parameters_and_settings_have_their_own() -> None:
    part, slow, fast = model(), OptimizerSettings(kind="sgd", lr=0.1), OptimizerSettings(kind="sgd", lr=0.5)
    some = [trainer_of(part, slow), trainer_of(part, slow, lambda name: name.startswith("1.")), trainer_of(part, fast)]
    assert [len(one.names) for one in some] == [4, 2, 4]
    assert [one.optimizer.param_groups[0]["lr"] for one in some] == [0.1, 0.1, 0.5]


def test_parameters_that_are_replaced_added_or_frozen_are_noticed() -> None:
    part, settings = model(), OptimizerSettings(kind="sgd", lr=0.1)
    before = Layout.of(part)
    assert Layout.of(part) is before
    part.get_submodule("1").bias = nn.Parameter(torch.ones(2))
    part.add_module("2", nn.Linear(2, 1))
    part.get_submodule("0").requires_grad_(False)
    trainer = trainer_of(part, settings)
    assert trainer.names == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert trainer.optimizer.param_groups[0]["params"][1] is part.get_parameter("1.bias")


def test_optimisers_from_outside_are_built_anew() -> None:
    class Counted(OptimizerSettings):
        def build(self, parameters: Any) -> Any:
            built = super().build(parameters)
            vars(built)["own"] = ["made"]
            return built

    part, settings = model(), Counted(kind="sgd", lr=0.1)
    first, second = (trainer_of(part, settings).optimizer for _ in range(2))
    assert vars(first)["own"] == ["made"]
    assert vars(first)["own"] is not vars(second)["own"]
