"""Training steps of one call of ``Participant.fit``: by itself, or together with those of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from polyfed.data.samples import Batch, Samples
from polyfed.federation.trainer import Correction, Trainer
from polyfed.models.model import CachedModel

if TYPE_CHECKING:
    from polyfed.federation.participant import Participant

Regulariser = Callable[[CachedModel, Batch], Tensor]
"""A loss that a method adds to the task's: from the model and a batch.

One that is a module can be computed for many clients at once, if all that differs between them is in its parameters,
buffers and modules, and if it takes the client's model from what it is called with."""


class Conductor(Protocol):
    """Has participants train together."""

    def step(self, fit: Fitting, batch: Batch) -> None:
        """Have a participant's step taken."""

    def leave(self, fit: Fitting) -> None:
        """A participant's training is over, whether it has ended or failed."""


_CONDUCTOR: ContextVar[Conductor | None] = ContextVar("conductor", default=None)


@contextmanager
def conducted(conductor: Conductor) -> Iterator[None]:
    """Who trains within the block, in this context, does so together with others."""
    token = _CONDUCTOR.set(conductor)
    try:
        yield
    finally:
        _CONDUCTOR.reset(token)


@dataclass(eq=False)
class Fitting:
    """What a participant trains on, and for; see ``Participant.fit`` for the meaning of each."""

    participant: Participant
    trainer: Trainer
    samples: Samples
    task_weight: float
    regulariser: Regulariser | None
    correct: Correction | None

    @contextmanager
    def stepping(self) -> Iterator[Callable[[Batch], None]]:
        conductor = _CONDUCTOR.get()
        if conductor is None:
            yield self.step_alone
            return
        try:
            yield partial(conductor.step, self)
        finally:
            conductor.leave(self)

    def step_alone(self, batch: Batch) -> None:
        self.trainer.step(self.loss(batch), self.correct)

    def loss(self, batch: Batch) -> Tensor:
        shared, losses = CachedModel(self.participant.model), []
        with self.participant.autocast():
            if self.task_weight:
                task, head = self.participant.task, self.participant.head
                loss = task.loss(shared, head, batch)
                losses.append(loss if self.task_weight == 1 else self.task_weight * loss)
            if self.regulariser is not None:
                losses.append(self.regulariser(shared, batch))  # what the task has embedded is not embedded again
        return sum(losses[1:], losses[0])


class Kept(nn.Module):
    """Tensors by name, in a module, whose own names cannot have dots."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = list(tensors)
        for name, value in tensors.items():
            self.register_buffer(_key(name), value)

    def __getitem__(self, name: str) -> Tensor:
        value = self._buffers[_key(name)]
        assert value is not None
        return value


def _key(name: str) -> str:
    return name.replace(".", "/")
