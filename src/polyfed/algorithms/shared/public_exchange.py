"""Exchange of representations of the public set, and training on it: a part that methods hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.distinct import distinct_count, packed, unpacked
from polyfed.algorithms.algorithm import Client, ClientInfo, Cohort, Reply, Representations, Server, each
from polyfed.algorithms.shared.public_training import Pair, interleave
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.federation.participant import Participant
from polyfed.federation.plan import FederationPlan
from polyfed.models.model import Embedder
from polyfed.wire.schema import schema_of

T = TypeVar("T")

GALLERY, UNPAIRED = "gallery", "unpaired"
"""Parts of the public set other than its pairs.

Outputs on the pairs are named after their modality, outputs on other parts ``<part>/<modality>``.
"""


def modality_of(output: str) -> str:
    return output.rpartition("/")[2]


def part_of(output: str) -> str:
    """The part of the public set that an output belongs to; empty for the pairs."""
    return output.rpartition("/")[0]


def of_part(outputs: Mapping[str, T], part: str = "") -> dict[str, T]:
    """Maps modalities to the outputs of one part of the public set, by default of its pairs."""
    return {modality_of(name): value for name, value in outputs.items() if part_of(name) == part}


def learnt(outputs: Mapping[str, T]) -> dict[str, T]:
    """The outputs from which participants learn: not those of the gallery, on which teacher and server are compared."""
    return {name: value for name, value in outputs.items() if part_of(name) != GALLERY}


class PublicExchange(Settings):
    """Representations of the public set, exchanged by participants of any architecture.

    An *output* is a modality, or a modality of a further part of the public set: unit vectors [n, d]. Down:
    ``server_outputs``, ``to_wire``, and ``from_wire`` at the client. Up: ``client_outputs``, ``layout``, and
    ``from_wire`` at the server. Each distinct input crosses once: captions of one image share its representation.
    """

    samples: int | None = Field(
        default=None, ge=2, description="public samples exchanged per round, drawn anew each; None: all of P"
    )
    extraction: Literal["eval", "train"] = Field(
        default="eval", description="mode and view in which exchanged representations are computed"
    )
    augment: bool = Field(default=False, description="training view of the public samples that participants train on")

    def require(self, plan: FederationPlan, *, learns_parts: bool = False) -> None:
        """Check that all of the public set is used, and that it is large enough as far as settings show.

        Args:
            plan: Plan of the federation.
            learns_parts: True if the method learns from public items without a partner, and exchanges the gallery.

        Raises:
            ConfigError: Some part of the public set has no effect, or it is too small.
        """
        if plan.public is not None and plan.public.items is not None and plan.public.per_item is not None:
            self._require_at_most(plan.public.items * plan.public.per_item)
        if plan.public is not None and plan.public.further and not learns_parts:
            raise ConfigError(
                "public.unpaired and public.gallery have no effect: the method learns from pairs alone; remove them, "
                "or choose one that distils from all parts, such as creamfl or change_distillation"
            )

    def require_samples(self, server: Server) -> None:
        """Check that the public set is large enough.

        Raises:
            ConfigError: The public set is too small.
        """
        if len(server.public_set) < 2:
            raise ConfigError(f"the public set has {len(server.public_set)} samples, too few; raise public.items")
        self._require_at_most(len(server.public_set))

    def _require_at_most(self, count: int) -> None:
        if self.samples is not None and self.samples > count:
            raise ConfigError(
                f"algorithm.public.samples is {self.samples}, but the public set has {count}; lower it, or leave it "
                "out for all"
            )

    def names_for(self, client: ClientInfo, names: Collection[str]) -> tuple[str, ...]:
        """The outputs among ``names`` that belong to a client's modalities."""
        return tuple(name for name in names if modality_of(name) in client.modalities)

    def for_clients(self, outputs: Representations) -> each[Representations]:
        """Each client's share of the outputs, those of its own modalities."""
        return each(
            lambda client: Representations(
                {name: outputs[name] for name in self.names_for(client, outputs)}, order=outputs.order
            )
        )

    def exchange(self, server: Server) -> Exchange:
        """The exchange of a round, with the server's representations as they are now."""
        return Exchange(self, server, self.server_outputs(server))

    # ---- outputs of a participant

    def drawn(self, participant: Participant) -> Samples:
        """The public samples that are exchanged in this round, in public order."""
        return participant.exchanged(self.samples)

    def outputs(self, participant: Participant) -> dict[str, Tensor]:
        """A participant's representations of the exchanged samples, output -> [n, d], without gradient."""
        training = self.extraction == "train"
        outputs = participant.represent(self.drawn(participant), training=training)
        for name, samples in participant.public.parts.items():
            outputs[name] = participant.represent(samples, training=training)[modality_of(name)]
        return outputs

    def batch_outputs(
        self, participant: Participant, model: Embedder, batch: Batch, names: Collection[str]
    ) -> dict[str, Tensor]:
        """Representations of a public batch by the participant's ``model``, modality -> [b, d], with gradient."""
        with participant.autocast():
            return {name: model.represent(name, batch.inputs[name]) for name in names}

    # ---- transport

    def inverse_index(self, participant: Participant) -> dict[str, Int64[Tensor, " n"]]:
        """Maps outputs to the distinct row of each sample; without outputs whose rows are all distinct."""
        if self.extraction == "train":  # each sample is augmented in its own way
            return {}
        # of all modalities of the public set: a client may receive those that it lacks
        samples = self.drawn(participant)
        pairs = {name: samples.distinct(name)[1] for name in samples.rows}
        return pairs | {name: part.distinct(modality_of(name))[1] for name, part in participant.public.parts.items()}

    def server_outputs(self, server: Server) -> Representations:
        """The server's own representations of the samples that are exchanged in this round."""
        return Representations(self.outputs(server), order=server.order(self.samples))

    def client_outputs(self, client: Client, order: str, names: Collection[str]) -> Representations:
        """The payload of a client's outputs with these names, or of these modalities in all parts of the public set."""
        # samples are drawn alike by all from seed and round, so that no index crosses
        wanted = set(names)
        outputs = {name: rows for name, rows in self.outputs(client).items() if wanted & {name, modality_of(name)}}
        return self.to_wire(client, outputs, order)

    def to_wire(self, participant: Participant, outputs: Mapping[str, Tensor], order: str) -> Representations:
        """The payload of outputs that depend on the input alone: each distinct input crosses once."""
        inverse = self.inverse_index(participant)
        return Representations({name: packed(rows, inverse.get(name)) for name, rows in outputs.items()}, order=order)

    def from_wire(self, participant: Participant, payload: Representations) -> dict[str, Tensor]:
        """The outputs [n, d] of a payload on all exchanged samples, on the participant's device.

        Raises:
            PayloadError: The number of rows is not the number of distinct inputs.
        """
        inverse = self.inverse_index(participant)
        for name, rows in payload.items():
            count = distinct_count(inverse[name]) if name in inverse else len(rows)
            if len(rows) != count:
                raise PayloadError(f"'{name}' has {len(rows)} rows, but there are {count} distinct inputs of it")
        return {name: unpacked(rows.to(participant.device), inverse.get(name)) for name, rows in payload.items()}

    def layout(self, server: Server, outputs: Representations, field: str) -> dict[str, each[Representations]]:
        """Layout of the representations that clients return in a field of their reply (``like`` of ``Cohort.ask``)."""
        inverse = self.inverse_index(server)
        rows = {
            name: torch.empty(distinct_count(inverse[name]) if name in inverse else len(x), *x.shape[1:], device="meta")
            for name, x in outputs.items()
        }
        return {field: self.for_clients(Representations(rows, order=outputs.order))}

    # ---- training on public samples

    def passes(
        self, participant: Participant, purpose: str, epochs: int, size: int, samples: Samples | None = None
    ) -> Iterator[Batch]:
        """Batches of shuffled passes over public samples (None: all of P), in the view that ``augment`` selects."""
        participant.model.train()
        for epoch in participant.epochs(epochs):
            yield from participant.public_batches(f"{purpose}-{epoch}", size, augment=self.augment, samples=samples)

    def part_passes(
        self, participant: Participant, purpose: str, epochs: int, size: int, samples: Samples, outputs: Collection[str]
    ) -> Iterator[dict[str, Batch]]:
        """``passes`` over the pairs, as part "", each batch with as large a share of every other part."""
        others = {
            name: self._endless(participant, f"{purpose}-{name}", max(2, round(size * len(part) / len(samples))), part)
            for name, part in participant.public.parts.items()
            if name in outputs
        }
        for batch in self.passes(participant, purpose, epochs, size, samples):
            yield {"": batch} | {name: next(batches) for name, batches in others.items()}

    def part_outputs(
        self, participant: Participant, model: Embedder, batches: Mapping[str, Batch], names: Collection[str]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Maps outputs to rows [b, d] with gradient and the index of their samples, for batches by part."""
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for part, batch in batches.items():
            known = {modality_of(name): name for name in names if (name == part if part else "/" not in name)}
            outputs = self.batch_outputs(participant, model, batch, list(known))
            rows |= {known[name]: (values, batch.index) for name, values in outputs.items()}
        return rows

    def among_private(
        self, client: Client, purpose: str, epoch: int, size: int, wanted: int | None, *, mixed: bool
    ) -> Iterator[Pair]:
        """Private batches of an epoch, with ``wanted`` exchanged ones spread among them, or in a pass after them.

        Mixed, None stands for one public batch per private one; after them, for all exchanged samples.
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


class Exchange:
    """One round's exchange of representations of the public set P.

    Attributes:
        outputs: The server's representations of P at the start of the round, output -> [n, d].
        order: Identifies the exchanged samples and their order.
    """

    def __init__(self, public: PublicExchange, server: Server, outputs: Representations) -> None:
        self.public, self.server, self.outputs, self.order = public, server, outputs, outputs.order

    @property
    def pairs(self) -> Representations:
        """Payload of the server's representations of the pairs."""
        return self.public.to_wire(self.server, of_part(self.outputs), self.order)

    @property
    def wanted(self) -> each[str]:
        """The outputs that each client is asked for, as JSON."""
        return each(lambda client: json.dumps(self.public.names_for(client, self.outputs)))

    def ask(self, cohort: Cohort, step: Callable[..., Reply], **request: Any) -> Iterator[Reply]:
        """Replies to a client step that returns representations of P, laid out like those of the exchange.

        Args:
            cohort: Clients of the round.
            step: Client step of the method.
            request: Fields of the request.
        """
        schema = schema_of(step)
        fields = [name for name, declared in schema.returns.items() if declared is Representations]
        if len(fields) != 1:
            raise TypeError(
                f"{schema.title} returns {fields or 'no'} representations; an exchange needs one such field"
            )
        return cohort.ask(step, like=self.public.layout(self.server, self.outputs, fields[0]), **request)


def row_shares(valid: Mapping[str, Bool[Tensor, " n"]]) -> dict[str, Float[Tensor, ""]]:
    """Maps outputs to their share of the valid rows of their modality, so that each row weighs the same."""
    counts = {name: rows.sum() for name, rows in valid.items()}  # on the device: used at every step
    totals = dict[str, Tensor]()
    for name, rows in counts.items():
        totals[modality_of(name)] = totals.get(modality_of(name), torch.zeros_like(rows)) + rows
    return {name: rows / totals[modality_of(name)].clamp_min(1) for name, rows in counts.items()}


def fixed_sample(server: Server, total: int, count: int) -> Tensor:
    """Ascending indices of ``count`` among ``total`` exchanged samples, the same in every round, for diagnostics."""
    # without the round: figures of two rounds are to be comparable
    order = torch.randperm(total, generator=generator(server.clock.seed, "diagnostic"))
    return order[:count].sort().values


def clip_row_norms(values: Tensor, largest: float = 1.0) -> Tensor:
    """Rows [n, d] of norm ``largest`` at most: longer ones are scaled down, so that no sender outweighs others.

    A hundredth more passes, as honest rows of unit norm are that much longer after rounding on the wire.
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return torch.where(norms > 1.01 * largest, values * (largest / norms), values)
