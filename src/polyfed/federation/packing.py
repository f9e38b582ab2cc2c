"""Which clients train together, in stacks, and which by themselves."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from polyfed.federation.client import Client
from polyfed.federation.fitting import Fitting
from polyfed.federation.stack import PaddedDrawsError, PendingStep, Stack, TrainingModule, pad_of
from polyfed.optim.stacked import StackedOptimizer

_log = logging.getLogger(__name__)

LARGEST = 500_000
"""Trained weights of a model from which on no stack of several is tried: it would not stay in the cache."""
_PROBES = 3  # steps by itself, and in a stack, that are timed before it is decided which are faster
_GAIN = 0.8  # of the time that a step by itself takes: a stack also has to be put together and taken apart


@dataclass(eq=False)
class Kind:
    """Training that is alike, and how it goes.

    Attributes:
        key: all that must be equal, see ``_key``.
        name: for reports.
        reason: why clients train by themselves; empty: they need not.
        pads: whether narrower batches may be padded to the width of others.
        alone: CPU seconds of this thread for steps of clients by themselves; wall time would judge a busy machine.
        together: the same a client for steps in stacks.
    """

    key: tuple[Any, ...]
    name: str
    reason: str = ""
    pads: bool = True
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    @property
    def loss_of_time(self) -> str:
        together, alone = min(self.together), min(self.alone)
        slow = together > _GAIN * alone
        return f"a step takes {1e3 * together:.2g} ms in a stack, {1e3 * alone:.2g} ms by itself" if slow else ""


@dataclass(eq=False)
class _Seat:
    """Where a client in training is; by itself without a stack, and all the time if its steps are to be timed."""

    parts: TrainingModule
    kind: Kind
    weights: int
    is_timed: bool
    stack: Stack | None = None


class Packer:
    """Takes the steps of clients that train at the same time, in stacks where that is possible and worth it.

    Args:
        measures: whether stacks must be worth it: large models are then not tried, and others timed.
    """

    def __init__(self, *, measures: bool) -> None:
        self._measures = measures
        self._kinds: list[Kind] = []
        self._seats: dict[Fitting, _Seat] = {}
        self.steps = Counter[str]()
        """Steps of clients that were taken ``together`` and ``alone``."""

    def enter(self, fit: Fitting) -> bool:
        """A client is about to train; whether it is to wait for others that do."""
        if fit not in self._seats:
            parts = TrainingModule(fit)
            held, kind = sum(tensor.numel() for tensor in parts.tensors.values()), self._kind_of(parts)
            # from its first step to its last, one after the other as without stacks: a step whose model is not in the
            # cache takes longer, and would speak for them
            self._seats[fit] = _Seat(parts, kind, held, self._measures and len(kind.alone) < _PROBES)
        return self.packs(fit) and not self._seats[fit].is_timed

    def packs(self, fit: Fitting) -> bool:
        return not self._seats[fit].kind.reason

    def leave(self, fit: Fitting) -> None:
        seat = self._seats.pop(fit, None)
        if seat is not None and seat.stack is not None:
            seat.stack.leave(fit)

    def advance(self, pending: Sequence[PendingStep]) -> tuple[list[PendingStep], bool]:
        """Take the steps of some clients, while all wait for theirs.

        Returns:
            Those clients, and whether their steps are taken; if not, they are to take them by themselves.
        """
        group = self._group(pending)
        seat = self._seats[group[0].fit]
        taken = len(group) > 1 and seat.stack is not None and self._together(seat.kind, seat.stack, group)
        return group, taken

    def took_alone(self, fit: Fitting, seconds: float) -> None:
        self.steps["alone"] += 1
        if (seat := self._seats[fit]).is_timed:
            seat.kind.alone.append(seconds)

    def weights(self, fit: Fitting) -> int:
        return self._seats[fit].weights

    def _kind_of(self, parts: TrainingModule) -> Kind:
        key = _key(parts)
        kind = next((kind for kind in self._kinds if kind.key == key), None)
        if kind is None:
            client = parts.fit.participant
            assert isinstance(client, Client)
            kind = Kind(key, client.info.architecture)
            self._kinds.append(kind)
            self._refuse(kind, self._objection(parts))
        return kind

    def _objection(self, parts: TrainingModule) -> str:
        fit = parts.fit
        if not StackedOptimizer.suits(fit.trainer.optimizer):
            return f"its optimiser is {type(fit.trainer.optimizer).__name__}"
        if (fit.regulariser is None) != (parts.regulariser is None):
            return "the method's regulariser is not a module"
        if (fit.correct is None) != (parts.correct is None):
            return "the method's correction of gradients is not a module"
        trained = sum(parts.tensors[f"model.{name}"].numel() for name in fit.trainer.names)
        return f"it trains {trained:,} weights" if self._measures and trained > LARGEST else ""

    def _refuse(self, kind: Kind, reason: str) -> None:
        """From now on clients of a kind train by themselves, if there is a reason."""
        kind.reason = reason
        if not reason:
            return
        level = logging.INFO if self._measures else logging.WARNING  # a surprise only to who asked for stacks
        _log.log(level, "clients with %s train one after the other: %s", kind.name, reason)
        for fit, seat in self._seats.items():
            if seat.kind is kind and seat.stack is not None:
                seat.stack.leave(fit)
                seat.stack = None

    def _group(self, pending: Sequence[PendingStep]) -> list[PendingStep]:
        """The most steps that can be taken at once; those in stacks come first, others may yet have company."""
        if stacked := [step for step in pending if self._seats[step.fit].stack is not None]:
            return _largest(stacked, self._form_of)
        group = _largest(pending, lambda step: self._seats[step.fit].kind)
        kind = self._seats[group[0].fit].kind
        if len(group) < 2 or kind.reason:
            return group
        stack = Stack([self._seats[step.fit].parts for step in group])
        for step in group:
            self._seats[step.fit].stack = stack
        return _largest(group, self._form_of)

    def _form_of(self, step: PendingStep) -> Hashable:
        seat, batch = self._seats[step.fit], step.batch
        opened = step.fit.samples.inputs
        free = {name for name in opened if seat.kind.pads and pad_of(opened[name]) is not None}
        shapes = (value.shape[2 if name in free else 1 :] for name, value in batch.inputs.items())
        return seat.stack, len(batch), tuple(shapes), tuple(step.fit.trainer.rates)

    def _together(self, kind: Kind, stack: Stack, group: list[PendingStep]) -> bool:
        started = time.thread_time()
        try:
            stack.step(group)
        except PaddedDrawsError:
            kind.pads = False
            return False
        except Exception as error:
            _log.debug("a stacked step failed", exc_info=True)
            if not kind.together:  # never yet: then it is the computation, not some client's data
                self._refuse(kind, f"{type(error).__name__}: {error}".splitlines()[0])
            return False  # who is to blame will raise it by itself
        self.steps["together"] += len(group)
        if len(kind.together) < _PROBES:
            kind.together.append((time.thread_time() - started) / len(group))
            if self._measures and len(kind.together) == _PROBES:
                self._refuse(kind, kind.loss_of_time)
        return True


def _key(parts: TrainingModule) -> tuple[Any, ...]:
    """All that must be equal of clients that train together."""
    fit = parts.fit
    client, trainer = fit.participant, fit.trainer
    assert isinstance(client, Client)
    outline = tuple((name, value.shape, value.dtype) for name, value in parts.tensors.items())
    task = client.objective, client.head_name, fit.task_weight, client.precision
    added = _settings(fit.regulariser), _settings(fit.correct)
    return client.info.architecture, task, trainer.training, tuple(trainer.names), added, outline


def _settings(added: object) -> object:
    """What a regulariser or a correction is, beside its tensors and modules."""
    if not isinstance(added, nn.Module):
        return added is None
    own = {name: value for name, value in vars(added).items() if name not in vars(nn.Module())}
    if tensors := [name for name, value in own.items() if isinstance(value, Tensor)]:
        raise TypeError(
            f"{type(added).__name__}.{tensors[0]} must be a buffer: clients that train together differ in it"
        )
    return type(added), own


def _largest(steps: Sequence[PendingStep], key: Callable[[PendingStep], Hashable]) -> list[PendingStep]:
    """The largest group of steps of equal key; of equally large ones the first."""
    groups = defaultdict[Hashable, list[PendingStep]](list)
    for step in steps:
        groups[key(step)].append(step)
    return max(groups.values(), key=len)
