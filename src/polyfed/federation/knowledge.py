"""What parties say of public samples: representations by modality, or class scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.federation.client import ClientInfo
from polyfed.federation.party import Party
from polyfed.federation.server import Server
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Representations, Scores

Knowledge = Representations | Scores


class Form(Protocol):
    """One kind of knowledge, by channel: a modality, or the target of the scores."""

    @property
    def largest(self) -> float:
        """L2 norm that a row may have in an average; longer ones are scaled down to it."""
        ...

    def of(self, party: Party, samples: Samples, *, training: bool = False) -> dict[str, Tensor]:
        """What a party knows of samples, channel -> [n, w], without gradient, on its device."""
        ...

    def outputs(self, party: Party, batch: Batch, channels: Sequence[str]) -> dict[str, Tensor]:
        """The same of a batch of public samples, [b, w], with gradient."""
        ...

    def artefact(self, values: Mapping[str, Tensor], order: str) -> Knowledge:
        """As it crosses."""
        ...

    def channels(self, client: ClientInfo, known: Sequence[str]) -> tuple[str, ...]:
        """Which of the channels that the server knows a client has."""
        ...

    def labels(self, party: Party, samples: Samples) -> Int64[Tensor, " n"] | None:
        """The true class of each sample, where classes are those of a target and the samples have it."""
        ...

    def anchors(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What rows are compared with to make scores of them; empty if they are scores."""
        ...

    def require(self, server: Server) -> None:
        """Check that all parties have such knowledge.

        Raises:
            ConfigError: one has not.
        """
        ...


@dataclass(frozen=True)
class RepresentationForm:
    """Representations of unit norm, by modality."""

    largest: float = 1.0

    def of(self, party: Party, samples: Samples, *, training: bool = False) -> dict[str, Tensor]:
        """Representations of all modalities that party and samples have."""
        return party.represent(samples, training=training)

    def outputs(self, party: Party, batch: Batch, channels: Sequence[str]) -> dict[str, Tensor]:
        """Representations of a batch."""
        with party.autocast():
            return {name: party.model.represent(name, batch.inputs[name]) for name in channels}

    def artefact(self, values: Mapping[str, Tensor], order: str) -> Representations:
        """A message of them."""
        return Representations(dict(values), order=order)

    def channels(self, client: ClientInfo, known: Sequence[str]) -> tuple[str, ...]:
        """The client's modalities, as far as the server encodes them."""
        return tuple(name for name in client.modalities if name in known)

    def labels(self, party: Party, samples: Samples) -> None:
        """There are none: sample k is a class of its own."""
        return

    def anchors(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The server's representations."""
        return known

    def require(self, server: Server) -> None:
        """Everybody has representations."""


@dataclass(frozen=True)
class ScoreForm:
    """Class scores (logits) of one classification that all parties have.

    Attributes:
        largest: norm of a row of scores at most; its mean is taken off first, which no softmax feels.
    """

    largest: float = 100.0

    def of(self, party: Party, samples: Samples, *, training: bool = False) -> dict[str, Tensor]:
        """Scores of all samples, in evaluation mode (or training mode and view)."""
        task, was = _classification(party), party.model.training
        stream = party.generator("scores") if training else None
        party.model.train(training)
        parts = []
        try:
            with torch.no_grad():
                for index in torch.split(torch.arange(len(samples)), party.evaluation_batch):
                    parts.append(self._scores(party, task, samples.batch(index, stream).to(party.device)))
        finally:
            party.model.train(was)
        return {task.target: torch.cat(parts)}

    def outputs(self, party: Party, batch: Batch, channels: Sequence[str]) -> dict[str, Tensor]:
        """Scores of a batch."""
        task = _classification(party)
        foreign = [name for name in channels if name != task.target]
        if foreign:
            raise ConfigError(
                f"scores of '{foreign[0]}' are exchanged, but '{party.name}' classifies '{task.target}'; give all "
                "parties one target"
            )
        return {name: self._scores(party, task, batch) for name in channels}

    def artefact(self, values: Mapping[str, Tensor], order: str) -> Scores:
        """A message of them."""
        return Scores(dict(values), order=order)

    def channels(self, client: ClientInfo, known: Sequence[str]) -> tuple[str, ...]:
        """All of them."""
        return tuple(known)

    def labels(self, party: Party, samples: Samples) -> Int64[Tensor, " n"] | None:
        """The samples' own classes, if they have any."""
        found = samples.targets.get(_classification(party).target)
        return None if found is None else found.long()

    def anchors(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def require(self, server: Server) -> None:
        """Check that server and clients classify.

        Raises:
            ConfigError: one does not.
        """
        _classification(server)
        for client in server.clients:
            if client.task != "classification":
                raise ConfigError(
                    f"algorithm.exchange is scores, but client '{client.id}' has the task '{client.task}'; give all "
                    "clients and the server one classification, or set algorithm.exchange=representations"
                )

    def _scores(self, party: Party, task: Classification, batch: Batch) -> Tensor:
        with party.autocast():
            found = task.scores(party.model, party.head, batch)
        found = found.float()
        return found - found.mean(1, keepdim=True)


def _classification(party: Party) -> Classification:
    if not isinstance(party.task, Classification):
        raise ConfigError(
            f"algorithm.exchange is scores, but the task of '{party.name}' is '{party.task.component_name()}'; give it "
            "a classification, or set algorithm.exchange=representations"
        )
    return party.task


def bounded(values: Tensor, largest: float) -> Tensor:
    """Rows [n, w] whose norm is at most ``largest``: longer ones are scaled down, so that no sender outweighs others.

    A hundredth more is let pass, as honest rows of unit norm are that much longer after rounding on the wire.
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return torch.where(norms > 1.01 * largest, values * (largest / norms), values)
