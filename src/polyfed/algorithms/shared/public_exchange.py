"""What participants exchange on a public set, and how they train on it: a part that methods hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.distinct import distinct_count, packed, unpacked
from polyfed.algorithms.algorithm import Client, ClientInfo, FederationPlan, Logits, Reply, Representations, Server
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.federation.participant import Participant
from polyfed.federation.public_outputs import (
    LogitKind,
    OutputKind,
    Pair,
    PublicOutputs,
    RepresentationKind,
    interleave,
    modality_of,
)
from polyfed.models.model import Embedder
from polyfed.wire.schema import Declared


class PublicExchange(Settings):
    """Outputs on the public set, of participants of any architecture.

    An *output* is a modality (participants exchange representations [n, d]) or a target (they exchange logits [n, C]).
    Outputs of parts of the public set beside its pairs are called ``<part>/<modality>``.
    """

    samples: int | None = Field(
        default=None, ge=2, description="so many public samples cross in a round, drawn anew each; None: all of P"
    )
    extraction: Literal["eval", "train"] = Field(
        default="eval", description="mode and view in which exchanged representations are computed"
    )
    augment: bool = Field(default=False, description="training view of the public samples that participants train on")

    @property
    def kind(self) -> OutputKind:
        """What crosses."""
        return RepresentationKind()

    @property
    def exchanges_scores(self) -> bool:
        return isinstance(self.kind, LogitKind)

    def require(self, plan: FederationPlan, *, learns_parts: bool = False) -> None:
        """Check that all participants have what crosses.

        Args:
            plan: of the federation.
            learns_parts: whether the method learns from public items without partner, and exchanges the gallery.

        Raises:
            ConfigError: somebody has not, or some of what is public has no effect.
        """
        self.kind.require(plan)
        if plan.public is not None and plan.public.further and (self.exchanges_scores or not learns_parts):
            what = "exchanges scores" if self.exchanges_scores else "learns from pairs alone"
            raise ConfigError(
                f"public.unpaired and public.gallery have no effect: the method {what}; remove them, or choose one "
                "that distils representations, such as creamfl or change_distillation"
            )

    def require_samples(self, server: Server) -> None:
        """Check that the public set is large enough.

        Raises:
            ConfigError: it is not.
        """
        if len(server.public_set) < 2:
            raise ConfigError(
                f"the public set has {len(server.public_set)} samples, too few to learn from; raise public.items"
            )
        if self.samples is not None and self.samples > len(server.public_set):
            raise ConfigError(
                f"algorithm.public.samples is {self.samples}, but the public set has {len(server.public_set)}; "
                "lower it, or leave it out for all"
            )

    def has_classes(self, federation: FederationPlan | Server) -> bool:
        """Whether the public set has the classes of the server's task: as settings say, or, of a server, as it is."""
        if isinstance(federation, FederationPlan):
            return federation.public_has_classes
        return self.kind.labels(federation, federation.public_set) is not None

    # ---- outputs of a participant, and how they cross

    def drawn(self, participant: Participant) -> Samples:
        """The public samples that are exchanged in this round, in public order."""
        return participant.exchanged(self.samples)

    def server_outputs(self, server: Server) -> PublicOutputs:
        """The server's own outputs on the samples that are exchanged in this round, output -> [n, w]."""
        # once a round: clients are compared with what the server was at its start, whatever it learns meanwhile
        return self.kind.bundle(self.outputs(server), server.order(self.samples))

    def outputs(self, participant: Participant) -> dict[str, Tensor]:
        """A participant's outputs on the exchanged samples, output -> [n, w], without gradient."""
        training = self.extraction == "train"
        outputs = self.kind.of(participant, self.drawn(participant), training=training)
        for name, samples in participant.parts.items():
            outputs[name] = participant.represent(samples, training=training)[modality_of(name)]
        return outputs

    def to_wire(self, participant: Participant, outputs: Mapping[str, Tensor], order: str) -> PublicOutputs:
        """The payload of outputs that depend on the input alone: each distinct input crosses once."""
        places = self.places(participant)
        return self.kind.bundle({name: packed(values, places.get(name)) for name, values in outputs.items()}, order)

    def from_wire(self, participant: Participant, payload: PublicOutputs) -> dict[str, Tensor]:
        """The outputs [n, w] of a payload on all exchanged samples, on the participant's device.

        Raises:
            PayloadError: it has not a row for each distinct input.
        """
        places = self.places(participant)
        for name, rows in payload.items():
            count = distinct_count(places[name]) if name in places else len(rows)
            if len(rows) != count:
                raise PayloadError(f"'{name}' has {len(rows)} rows, but there are {count} distinct inputs of it")
        return {name: unpacked(rows.to(participant.device), places.get(name)) for name, rows in payload.items()}

    def places(self, participant: Participant) -> dict[str, Int64[Tensor, " n"]]:
        """Output -> which of its distinct rows each sample has; nothing for outputs without repeated rows."""
        if self.extraction == "train":  # each sample is augmented in its own way
            return {}
        places = self.kind.places(self.drawn(participant))
        further = participant.parts.items()
        return places | {name: samples.distinct(modality_of(name))[1] for name, samples in further}

    def client_outputs(self, client: Client, order: str, names: Collection[str]) -> PublicOutputs:
        """The payload of a client's outputs with these names, or of these modalities in all parts of the public set."""
        # samples are drawn alike by all from seed and round, so that no index crosses
        wanted = set(names)
        outputs = {name: rows for name, rows in self.outputs(client).items() if wanted & {name, modality_of(name)}}
        return self.to_wire(client, outputs, order)

    def check(self, server: Server, server_outputs: PublicOutputs, field: str) -> Callable[[Reply], None]:
        """Raises PayloadError for a reply whose ``field`` is not what its sender was asked for."""
        payload = self.to_wire(server, server_outputs, server_outputs.order)
        shapes = {name: tuple(rows.shape) for name, rows in payload.items()}

        def check(reply: Reply) -> None:
            expected = self.kind.channels(reply.sender, list(shapes))
            getattr(reply, field).require(server_outputs.order, {name: shapes[name] for name in expected})

        return check

    # ---- training on public samples

    def passes(
        self, participant: Participant, purpose: str, epochs: int, size: int, samples: Samples | None = None
    ) -> Iterator[Batch]:
        """Batches of shuffled passes over public samples (None: all of P), to train on, as ``augment`` says."""
        participant.model.train()
        for epoch in participant.epochs(epochs):
            yield from participant.public_batches(f"{purpose}-{epoch}", size, augment=self.augment, samples=samples)

    def part_passes(
        self,
        participant: Participant,
        purpose: str,
        epochs: int,
        size: int,
        samples: Samples,
        outputs: Collection[str],
    ) -> Iterator[dict[str, Batch]]:
        """``passes`` over the pairs, as part "", and beside each batch as large a share of every other part."""
        others = {
            name: self._endless(participant, f"{purpose}-{name}", max(2, round(size * len(part) / len(samples))), part)
            for name, part in participant.parts.items()
            if name in outputs
        }
        for batch in self.passes(participant, purpose, epochs, size, samples):
            yield {"": batch} | {name: next(batches) for name, batches in others.items()}

    def part_outputs(
        self, participant: Participant, model: Embedder, batches: Mapping[str, Batch], names: Collection[str]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Output -> rows [b, w] with gradient, and the index of their samples, of batches by part, by ``model``."""
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for part, batch in batches.items():
            known = {modality_of(name): name for name in names if (name == part if part else "/" not in name)}
            outputs = self.kind.outputs(participant, model, batch, list(known))
            rows |= {known[name]: (values, batch.index) for name, values in outputs.items()}
        return rows

    def beside_private(
        self, client: Client, purpose: str, epoch: int, size: int, wanted: int | None, *, mixed: bool
    ) -> Iterator[Pair]:
        """Private batches of an epoch, and ``wanted`` exchanged ones spread evenly among them, or in a pass after them.

        Mixed, None stands for one public batch a private one; after them, for all exchanged samples.
        """
        private, samples = client.batches(client.train, f"task-{epoch}"), self.drawn(client)
        if mixed:
            public = self._endless(client, f"{purpose}-{epoch}", size, samples)
            yield from interleave(private, public, client.steps_an_epoch, wanted)
        else:
            yield from ((batch, None) for batch in private)
            yield from ((None, batch) for batch in self.one_pass(client, f"{purpose}-{epoch}", size, wanted))

    def one_pass(self, client: Client, purpose: str, size: int, wanted: int | None = None) -> Iterator[Batch]:
        """One pass over the exchanged samples, or ``wanted`` batches of it."""
        samples = self.drawn(client)
        return client.public_batches(purpose, size, augment=self.augment, samples=samples, wanted=wanted)

    def _endless(self, participant: Participant, purpose: str, size: int, samples: Samples) -> Iterator[Batch]:
        """Passes over public samples without end, each of which draws anew."""
        for number in count():
            yield from participant.public_batches(f"{purpose}-{number}", size, augment=self.augment, samples=samples)


class EitherExchange(PublicExchange):
    """An exchange of class scores (logits), or of representations by modality.

    In the second form every exchanged sample is a class of its own: the logits of a representation u are its
    similarities u G^T / tau, G being the server's representations of the exchanged samples in the same modality as they
    were at the start of the round. None of the methods that hold this part was published in that form.
    """

    form: Literal["representations", "scores"] = Field(
        default="representations",
        description="what crosses: representations by modality, or scores of one classification",
    )
    largest_score: float | None = Field(
        default=None,
        gt=0,
        description="scores: L2 norm of a row in an average; longer rows are scaled down to it; None: 100",
    )

    @model_validator(mode="after")
    def _norm_of_scores(self) -> Self:
        if self.largest_score is not None and self.form != "scores":
            raise ValueError(f"largest_score {self.largest_score} is of scores, but form is {self.form}; leave it out")
        return self

    @property
    def kind(self) -> OutputKind:
        return LogitKind(self.largest_score or LogitKind.largest) if self.form == "scores" else RepresentationKind()

    def sends(self, declared: Declared) -> Declared:
        """Scores or representations, where either is declared; see ``Algorithm.sends``."""
        either = declared == Representations | Logits
        return (Logits if self.exchanges_scores else Representations) if either else declared

    def tau(self, temperature: float | None) -> float:
        """A softmax's temperature; None: 1 for scores, 0.1 for similarities."""
        return temperature or (1.0 if self.exchanges_scores else 0.1)

    def labels(self, server: Server) -> Int64[Tensor, " n"] | None:
        """True classes of the public set, where scores cross and it has them."""
        return self.kind.labels(server, server.public_set)

    def anchors(self, server_outputs: PublicOutputs, output: str) -> Tensor | None:
        """What rows [., d] of an output are compared with, [n, d]; None: they are logits."""
        return self.kind.anchors(server_outputs).get(output)

    def outputs_for(self, public_outputs: PublicOutputs) -> Callable[[ClientInfo], PublicOutputs]:
        """Client -> those of the public outputs that it has itself."""

        def of(client: ClientInfo) -> PublicOutputs:
            names = self.kind.channels(client, list(public_outputs))
            return self.kind.bundle({name: public_outputs[name] for name in names}, public_outputs.order)

        return of

    def asked(self, server_outputs: PublicOutputs) -> Callable[[ClientInfo], str]:
        """Client -> the outputs that it is asked for, as JSON."""
        return lambda client: json.dumps(self.kind.channels(client, list(server_outputs)))


def row_shares(valid: Mapping[str, Bool[Tensor, " n"]]) -> dict[str, Float[Tensor, ""]]:
    """Output -> its share of the valid rows of its modality, so that each has the same weight in a sum of means."""
    counts = {name: rows.sum() for name, rows in valid.items()}  # left on the device: it is asked at every step
    totals = dict[str, Tensor]()
    for name, rows in counts.items():
        totals[modality_of(name)] = totals.get(modality_of(name), torch.zeros_like(rows)) + rows
    return {name: rows / totals[modality_of(name)].clamp_min(1) for name, rows in counts.items()}


def fixed_sample(server: Server, total: int, count: int) -> Tensor:
    """Ascending indices of ``count`` among ``total`` exchanged samples, the same in every round, for diagnostics."""
    # without the round: figures of two rounds are to be comparable
    order = torch.randperm(total, generator=generator(server.clock.seed, "diagnostic"))
    return order[:count].sort().values
