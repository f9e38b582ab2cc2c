"""Methods that were published for logits and can exchange representations instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import ClientInfo
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.effects import Only
from polyfed.federation.public_outputs import LogitKind, OutputKind, PublicOutputs, RepresentationKind
from polyfed.wire.payload import Logits, Representations
from polyfed.wire.schema import Declared

Exchanged = Literal["representations", "scores"]

OF_FORM = Only(exchange="representations")
"""Representations cross."""


class EitherForm(PublicExchange):
    """Methods over a public set whose participants exchange logits, or representations by modality.

    In the second form every exchanged sample is a class of its own: the logits of a representation u are its
    similarities u G^T / tau, G being the server's representations of the exchanged samples in the same modality as they
    were at the start of the round. None of these methods was published in that form.
    """

    exchange: Exchanged = Field(
        default="representations",
        description="what crosses: representations by modality, or scores of one classification",
    )
    largest_score: Annotated[float, Only(exchange="scores")] = Field(
        default=100.0, gt=0, description="scores: L2 norm of a row in an average; longer rows are scaled down to it"
    )

    @property
    def output_kind(self) -> OutputKind:
        return LogitKind(self.largest_score) if self.exchange == "scores" else RepresentationKind()

    def sends(self, declared: Declared) -> Declared:
        """Scores or representations, where either is declared."""
        either = declared == Representations | Logits
        return (Logits if self.exchanges_logits else Representations) if either else declared

    def anchors(self, server_outputs: PublicOutputs, output: str) -> Tensor | None:
        """What rows [., d] of an output are compared with, [n, d]; None: they are logits."""
        return self.output_kind.anchors(server_outputs).get(output)

    def outputs_for(self, public_outputs: PublicOutputs) -> Callable[[ClientInfo], PublicOutputs]:
        """Client -> those of the public outputs that it has itself."""

        def of(client: ClientInfo) -> PublicOutputs:
            names = self.output_kind.channels(client, list(public_outputs))
            return self.output_kind.bundle({name: public_outputs[name] for name in names}, public_outputs.order)

        return of

    def asked_outputs(self, server_outputs: PublicOutputs) -> Callable[[ClientInfo], str]:
        return lambda client: json.dumps(self.output_kind.channels(client, list(server_outputs)))


class SoftmaxForm(EitherForm):
    """Those of them that take softmaxes: over classes, or over similarities to the exchanged samples."""

    temperature: float | None = Field(
        default=None, gt=0, description="of softmaxes over classes; None: 1 for scores, 0.1 for similarities"
    )

    @property
    def tau(self) -> float:
        return self.temperature or (1.0 if self.exchange == "scores" else 0.1)
