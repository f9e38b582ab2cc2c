"""The base of methods whose participants exchange outputs on a public set."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.distinct import distinct_count, packed, unpacked
from polyfed.algorithms.algorithm import Algorithm, Client, Cohort, Lifetime, LocalTraining, Reply, Server
from polyfed.core.effects import Not, Only
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.randomness import generator
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

DISTILS = Only(kd_epochs=Not(0), kd_weight=Not(0))
"""The server learns from what clients send."""


class PublicExchange(Algorithm):
    """Personal clients of any architecture, and a server model that learns from their outputs on a public set.

    An *output* is a modality (participants exchange representations [n, d]) or a target (they exchange logits [n, C]).
    A method says what the server asks for (``aggregate``), and what it makes of that (``distil``).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True
    learns_parts: ClassVar[bool] = False
    """Whether the server learns from public items without partner, and the gallery is exchanged."""

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs a round")
    public_samples: int | None = Field(
        default=None, ge=2, description="so many public samples cross in a round, drawn anew each; None: all of P"
    )
    extraction: Literal["eval", "train"] = Field(
        default="eval", description="mode and view in which exchanged representations are computed"
    )
    public_augment: Annotated[bool, Only(kd_epochs=Not(0))] = Field(
        default=False, description="training view of public samples in contrasts and in (joint) distillation"
    )
    kd_weight: Annotated[float, Only(kd_epochs=Not(0))] = Field(
        default=1.0, ge=0, description="factor of the distillation loss"
    )
    kd_epochs: int = Field(default=1, ge=0, description="passes over P that distil a round")

    @property
    def local_training(self) -> LocalTraining:
        """``local_epochs``."""
        return LocalTraining(self.local_epochs)

    @property
    def server_passes(self) -> int:
        """``kd_epochs``."""
        return self.kd_epochs

    @property
    def output_kind(self) -> OutputKind:
        """What crosses: representations, unless a method says otherwise."""
        return RepresentationKind()

    @property
    def exchanges_logits(self) -> bool:
        return isinstance(self.output_kind, LogitKind)

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check that the public set is large enough, and that all participants have what crosses.

        Raises:
            ConfigError: one of them is not so.
        """
        if len(server.public_set) < 2:
            raise ConfigError(
                f"the public set has {len(server.public_set)} samples, too few to learn from; raise public.items"
            )
        if self.public_samples is not None and self.public_samples > len(server.public_set):
            raise ConfigError(
                f"algorithm.public_samples is {self.public_samples}, but the public set has {len(server.public_set)}; "
                "lower it, or leave it out for all"
            )
        self.output_kind.require(server)
        if server.parts and (self.exchanges_logits or not self.learns_parts):
            what = "exchanges scores" if self.exchanges_logits else "learns from pairs alone"
            raise ConfigError(
                f"public.unpaired and public.gallery have no effect: algorithm '{self.component_name()}' {what}; "
                "remove them, or choose a method that distils representations, such as creamfl or change_distillation"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        self.distil(server, self.aggregate(server, cohort, self.server_outputs(server)))

    def server_outputs(self, server: Server) -> PublicOutputs:
        """The server's own outputs on the samples that are exchanged in this round, output -> [n, w]."""
        # once a round: clients are compared with what the server was at its start, whatever it learns meanwhile
        return self.output_kind.bundle(self.outputs_of(server), server.order(self.public_samples))

    # ---- outputs of a participant, and how they cross

    def outputs_of(self, participant: Participant) -> dict[str, Tensor]:
        """A participant's outputs on the exchanged samples, output -> [n, w], without gradient."""
        training = self.extraction == "train"
        outputs = self.output_kind.of(participant, participant.exchanged(self.public_samples), training=training)
        for name, samples in participant.parts.items():
            outputs[name] = participant.represent(samples, training=training)[modality_of(name)]
        return outputs

    def to_wire(self, participant: Participant, outputs: Mapping[str, Tensor], order: str) -> PublicOutputs:
        """The payload of outputs that depend on the input alone: each distinct input crosses once."""
        places = self.places(participant)
        rows = {name: packed(values, places.get(name)) for name, values in outputs.items()}
        return self.output_kind.bundle(rows, order)

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
        places = self.output_kind.places(participant.exchanged(self.public_samples))
        further = participant.parts.items()
        return places | {name: samples.distinct(modality_of(name))[1] for name, samples in further}

    def client_outputs(self, client: Client, order: str, names: Collection[str]) -> PublicOutputs:
        """The payload of a client's outputs with these names, or of these modalities in all parts of the public set."""
        # samples are drawn alike by all from seed and round, so that no index crosses
        wanted = set(names)
        outputs = {name: rows for name, rows in self.outputs_of(client).items() if wanted & {name, modality_of(name)}}
        return self.to_wire(client, outputs, order)

    def shapes(self, server: Server, server_outputs: PublicOutputs) -> dict[str, tuple[int, ...]]:
        """Output -> shape in which it crosses."""
        payload = self.to_wire(server, server_outputs, server_outputs.order)
        return {name: tuple(rows.shape) for name, rows in payload.items()}

    def outputs_check(self, server: Server, server_outputs: PublicOutputs, field: str) -> Callable[[Reply], None]:
        """Raises PayloadError for a reply whose ``field`` is not what its sender was asked for."""
        shapes = self.shapes(server, server_outputs)

        def check(reply: Reply) -> None:
            expected = self.output_kind.channels(reply.sender, list(shapes))
            getattr(reply, field).require(server_outputs.order, {name: shapes[name] for name in expected})

        return check

    # ---- rounds

    @abstractmethod
    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> Mapping[str, Any]:
        """Ask the cohort, and make of its replies what the server is to learn, by output."""

    @abstractmethod
    def distil(self, server: Server, targets: Mapping[str, Any]) -> None:
        """Teach the server's model what ``aggregate`` made."""

    def public_passes(
        self, participant: Participant, purpose: str, epochs: int, size: int, samples: Samples | None = None
    ) -> Iterator[Batch]:
        """Batches of shuffled passes over public samples (None: all of P), to train on, as ``public_augment`` says."""
        participant.model.train()
        for epoch in participant.epochs(epochs):
            yield from participant.public_batches(
                f"{purpose}-{epoch}", size, augment=self.public_augment, samples=samples
            )

    def part_passes(
        self,
        participant: Participant,
        purpose: str,
        epochs: int,
        size: int,
        samples: Samples,
        outputs: Collection[str],
    ) -> Iterator[dict[str, Batch]]:
        """``public_passes`` over the pairs, as part "", and beside each batch as large a share of every other part."""
        others = {
            name: self._endless(participant, f"{purpose}-{name}", max(2, round(size * len(part) / len(samples))), part)
            for name, part in participant.parts.items()
            if name in outputs
        }
        for batch in self.public_passes(participant, purpose, epochs, size, samples):
            yield {"": batch} | {name: next(batches) for name, batches in others.items()}

    def part_outputs(
        self, participant: Participant, model: Embedder, batches: Mapping[str, Batch], names: Collection[str]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Output -> rows [b, w] with gradient, and the index of their samples, of batches by part, by ``model``."""
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for part, batch in batches.items():
            known = {modality_of(name): name for name in names if (name == part if part else "/" not in name)}
            outputs = self.output_kind.outputs(participant, model, batch, list(known))
            rows |= {known[name]: (values, batch.index) for name, values in outputs.items()}
        return rows

    def mixed_batches(
        self, client: Client, private: Iterator[Batch], purpose: str, size: int, wanted: int | None, samples: Samples
    ) -> Iterator[Pair]:
        """Private batches of an epoch, and ``wanted`` public ones (None: one each) spread evenly among them."""
        public = self._endless(client, purpose, size, samples)
        return interleave(private, public, client.steps_an_epoch, wanted)

    def _endless(self, participant: Participant, purpose: str, size: int, samples: Samples) -> Iterator[Batch]:
        """Passes over public samples without end, each of which draws anew."""
        for number in count():
            yield from participant.public_batches(
                f"{purpose}-{number}", size, augment=self.public_augment, samples=samples
            )


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
