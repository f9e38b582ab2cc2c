"""Optimisers of a participant, and the epochs of its training loops, by which their schedules go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import Optimizer

from polyfed.data.samples import Batch
from polyfed.federation.settings import TrainingSettings
from polyfed.models.blocks import undecayed
from polyfed.models.model import CachedModel, Layout, trained_in
from polyfed.optim.settings import OptimizerSettings, clip_gradients, fresh, load_optimizer_tensors, optimizer_tensors

Regulariser = Callable[[CachedModel, Batch], Tensor]
"""A loss that a method adds to the task's: from the model and a batch."""

Correction = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]
"""Changes gradients in place: of parameter name -> gradient, and -> parameter."""


@dataclass(frozen=True)
class Clock:
    """Seed of the run, the round, and the number of rounds.

    ``epochs`` is the number by which a round advances schedules by epoch, for all participants and loops alike.
    """

    seed: int
    round: int
    rounds: int
    epochs: int = 1


class Epoch(NamedTuple):
    """A pass of a training loop."""

    number: int
    """From 0."""
    of: int
    """How many passes the loop has."""


class Epochs:
    """Counts the passes of a participant's training loops; all its trainers take their rates from here.

    A step outside a loop over epochs is refused, so that no method can leave a schedule by epochs out.
    """

    def __init__(self) -> None:
        self.current: Epoch | None = None
        """None outside of loops."""
        self.losses: list[Tensor] = []
        """Losses of the optimiser steps, in order, on their device; read only where the result is not finite."""

    def through(self, epochs: int) -> Iterator[int]:
        """The passes of one loop, from 0; every loop counts its own."""
        return self._counted(Epoch(epoch, epochs) for epoch in range(epochs))

    def as_one(self) -> Iterator[int]:
        """Passes without end, from 0, of a loop over a number of batches: a schedule counts them as one epoch."""
        return self._counted(repeat(Epoch(0, 1)))

    @property
    def now(self) -> Epoch:
        """The current epoch.

        Raises:
            RuntimeError: no loop over epochs is under way.
        """
        if self.current is None:
            raise RuntimeError("a trainer steps within an epoch alone: 'for epoch in participant.epochs(number)'")
        return self.current

    def _counted(self, epochs: Iterable[Epoch]) -> Iterator[int]:
        before = self.current
        try:
            for number, self.current in enumerate(epochs):
                yield number
        finally:  # also where the loop is left early
            self.current = before


_Choice = Callable[[str], bool]


class Trainer:
    """One optimiser over a participant's parameters, with its clipping, schedule and state.

    It steps only while ``epochs`` counts an epoch, at the rates that the schedule has for this one.
    """

    def __init__(
        self, model: nn.Module, training: TrainingSettings, clock: Clock, epochs: Epochs, only: _Choice | None = None
    ) -> None:
        self._named = [(name, value) for name, value in trained_in(model).items() if only is None or only(name)]
        self._parameters = [value for _, value in self._named]
        self.training, self._clock, self._epochs = training, clock, epochs
        self.optimizer = _optimizer(model, training.optimizer, self._parameters)
        self._base = [group["lr"] for group in self.optimizer.param_groups]
        self._epoch: Epoch | None = None  # of the present rates
        self.steps = 0  # since it was made

    def step(self, loss: Tensor, correct: Correction | None = None) -> None:
        """One optimiser step on a scalar loss; ``correct`` changes the gradients before they are clipped.

        There is none on a loss of 0 without gradient, such as that of a batch without a pair.
        """
        if not loss.requires_grad and not float(loss):  # any other loss without gradient is a mistake, and fails below
            return
        self.zero_grad()
        self._epochs.losses.append(loss.data)  # no operator, and without the graph
        backward(loss)
        self.apply(correct)

    def zero_grad(self) -> None:
        for value in self._parameters:  # what the optimiser's own way does, without its records for profilers
            value.grad = None

    def apply(self, correct: Correction | None = None) -> None:
        if correct is not None:
            reached = {name: value for name, value in self._named if value.grad is not None}
            correct({name: value.grad for name, value in reached.items() if value.grad is not None}, reached)
        # after the correction, which is part of the step that is clipped
        clip_gradients(self._parameters, self.training.optimizer.clip)
        if (epoch := self._epochs.now) is not self._epoch:
            self._epoch = epoch
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate
        self.optimizer.step()
        self.steps += 1

    @property
    def rates(self) -> list[float]:
        epoch, clock = self._epochs.now, self._clock
        factor = self.training.schedule.factor(clock.round - 1, clock.rounds, epoch.number, clock.epochs)
        return [base * factor for base in self._base]

    @property
    def names(self) -> list[str]:
        names = {id(value): name for name, value in self._named}
        return [names[id(value)] for group in self.optimizer.param_groups for value in group["params"]]

    def state(self) -> dict[str, Tensor]:
        return optimizer_tensors(self.optimizer, self._named)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore ``state``, to which learning rates do not belong."""
        load_optimizer_tensors(self.optimizer, self._named, state)
        self._epoch = None


@dataclass
class Optimizers:
    """A participant's optimisers by name.

    Attributes:
        states: kept ones, which the optimisers of that name go on from.
        trainers: those that were asked for in this round.
        epochs: counts the passes of training loops, by which all take their rates.
    """

    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    epochs: Epochs = field(default_factory=Epochs)

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """States of all optimisers, those used and those only kept."""
        return self.states | {name: trainer.state() for name, trainer in self.trainers.items()}


def _optimizer(model: nn.Module, settings: OptimizerSettings, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """A new optimiser of some of a model's parameters; made from one of the same parameters and settings if known."""
    known, key = Layout.of(model).optimizers, (*map(id, parameters),)
    if key not in known or known[key][0] is not settings:
        exempt = {id(value) for value in undecayed(model)}
        decayed = [value for value in parameters if id(value) not in exempt]
        spared = [value for value in parameters if id(value) in exempt]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        # an optimiser refuses an empty group
        made = settings.build([group for group in groups if group["params"]])
        if type(settings) is not OptimizerSettings:  # others may hold more than state and groups
            return made
        known[key] = settings, made
    return fresh(known[key][1])


def step_together(loss: Tensor, *trainers: Trainer) -> None:
    """One step of several optimisers, of different parameters, on one scalar loss."""
    trainers[0]._epochs.losses.append(loss.data)
    for trainer in trainers:
        trainer.zero_grad()  # all at first: the loss may reach parameters of each
    backward(loss)
    for trainer in trainers:
        trainer.apply()


def first_not_finite(losses: Sequence[Tensor | float]) -> str:
    """Continues the line about a failure with the first step whose loss is NaN or infinite; empty if none is."""
    values = (float(loss) for loss in losses)
    bad = next(((number, value) for number, value in enumerate(values, 1) if not math.isfinite(value)), None)
    return f"; the loss was {bad[1]:g} in optimisation step {bad[0]} of {len(losses)}" if bad else ""
