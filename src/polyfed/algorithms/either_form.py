"""What methods share here that were published for class scores and can exchange representations instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from polyfed.algorithms.ensemble_distillation import DISTILS, EnsembleDistillation
from polyfed.core.effects import Condition, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.client import Client, ClientInfo
from polyfed.federation.participant import Participant
from polyfed.federation.public_outputs import LogitKind, OutputKind, PublicOutputs, RepresentationKind
from polyfed.federation.server import Server
from polyfed.models.model import CachedModel

Exchange = Literal["representations", "scores"]

OF_FORM = Only(exchange="representations")
"""Representations cross."""


class EitherForm(EnsembleDistillation):
    """Methods over a public set whose participants exchange class scores, or representations by modality.

    In the second form every exchanged sample is a class of its own: the scores of a representation u are its
    similarities u G^T / tau, G being the server's representations of the exchanged samples in the same modality as they
    were at the start of the round. None of these methods was published in that form.
    """

    only_if: ClassVar[Mapping[str, Condition]] = {"renormalise_target": DISTILS & OF_FORM}

    exchange: Exchange = Field(
        default="representations",
        description="what crosses: representations by modality, or scores of one classification",
    )
    largest_score: Annotated[float, Only(exchange="scores")] = Field(
        default=100.0, gt=0, description="scores: L2 norm of a row in an average; longer rows are scaled down to it"
    )
    temperature: float | None = Field(
        default=None, gt=0, description="of softmaxes over classes; None: 1 for scores, 0.1 for similarities"
    )

    @property
    def form(self) -> OutputKind:
        """Representations or scores."""
        return LogitKind(self.largest_score) if self.exchange == "scores" else RepresentationKind()

    @property
    def tau(self) -> float:
        """The temperature."""
        return self.temperature or (1.0 if self.exchange == "scores" else 0.1)

    def setup(self, server: Server) -> None:
        """Check also that the server can train its task on the public set.

        Raises:
            ConfigError: its classes are to be learnt, and the public set has none.
        """
        super().setup(server)
        if self.exchange == "scores" and self.server_epochs and self.form.labels(server, server.public_set) is None:
            raise ConfigError(
                f"algorithm.server_epochs is {self.server_epochs}, but the public set lacks the classes that the "
                "server is to learn; name their column under the source's targets, or set algorithm.server_epochs=0"
            )

    def anchors(self, known: PublicOutputs, channel: str) -> Tensor | None:
        """What rows of a channel are compared with; None: they are class scores."""
        return self.form.anchors(known).get(channel)

    def share(self, known: PublicOutputs) -> Callable[[ClientInfo], PublicOutputs]:
        """What of some knowledge each client gets: that of its own channels."""

        def of(client: ClientInfo) -> PublicOutputs:
            own = self.form.channels(client, list(known))
            return self.form.bundle({name: known[name] for name in own}, known.order)

        return of

    def wanted(self, known: PublicOutputs) -> Callable[[ClientInfo], str]:
        """The channels on which each client is to speak, JSON."""
        return lambda client: json.dumps(self.form.channels(client, list(known)))

    def say(self, client: Client, order: str, channels: Sequence[str]) -> PublicOutputs:
        """What the client says of the exchanged samples."""
        samples = client.exchanged(self.public_samples)
        own = self.form.of(client, samples, training=self.extraction == "train")
        return self.form.bundle({name: value for name, value in own.items() if name in channels}, order)

    def outputs(
        self, participant: Participant, model: CachedModel, batch: Batch, channels: Sequence[str]
    ) -> dict[str, Tensor]:
        """Outputs on a batch, with gradient; representations come from embeddings that ``model`` shares."""
        if self.exchange == "scores":
            return self.form.outputs(participant, batch, channels)
        with participant.autocast():
            return {name: model.represent(name, batch.inputs[name]) for name in channels}
