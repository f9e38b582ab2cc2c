"""The loss that a participant's model is trained by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from polyfed.data.samples import Batch
from polyfed.models.model import CachedModel

if TYPE_CHECKING:
    from polyfed.federation.participant import Participant

Regulariser = Callable[[CachedModel, Batch], Tensor]
"""A loss that a method adds to the task's: from the model and a batch."""


def training_loss(
    participant: Participant, batch: Batch, task_weight: float = 1.0, regulariser: Regulariser | None = None
) -> Tensor:
    """The scalar ``task_weight`` * task loss + regulariser of a batch; a weight of 0 leaves the task out."""
    shared, losses = CachedModel(participant.model), []
    with participant.autocast():
        if task_weight:
            loss = participant.task.loss(shared, participant.head, batch)
            losses.append(loss if task_weight == 1 else task_weight * loss)
        if regulariser is not None:
            losses.append(regulariser(shared, batch))  # what the task has embedded is not embedded again
    return sum(losses[1:], losses[0])
