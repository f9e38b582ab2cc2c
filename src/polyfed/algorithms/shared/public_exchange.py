"""What participants exchange on a public set, and how they train on it: a part that methods hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from typing import Literal, Self, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.distinct import distinct_count, packed, unpacked
from polyfed.algorithms.algorithm import Client, ClientInfo, FederationPlan, Logits, Representations, Server
from polyfed.algorithms.shared.public_training import Pair, interleave
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.randomness import generator
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.federation.client import SERVER
from polyfed.federation.filters import each
from polyfed.federation.participant import Participant
from polyfed.models.model import Embedder
from polyfed.tasks.classification import Classification
from polyfed.tasks.task import Task
from polyfed.wire.schema import Declared

T = TypeVar("T")
PublicOutputs = Representations | Logits

GALLERY, UNPAIRED = "gallery", "unpaired"
"""Parts of the public set beside its pairs; outputs on these are called after their modality, on others
``<part>/<modality>``."""


def modality_of(output: str) -> str:
    return output.rpartition("/")[2]


def part_of(output: str) -> str:
    """The part of the public set that an output belongs to; empty for the pairs."""
    return output.rpartition("/")[0]


def of_part(outputs: Mapping[str, T], part: str = "") -> dict[str, T]:
    """Modality (or target) -> the outputs of one part of the public set; of its pairs without a name."""
    return {modality_of(name): value for name, value in outputs.items() if part_of(name) == part}


class PublicExchange(Settings):
    """Outputs on the public set, of participants of any architecture.

    An *output* is a modality (participants exchange representations [n, d] of unit norm) or a target (they exchange
    logits [n, C] of one classification). Down: ``server_outputs``, ``to_wire``, and ``from_wire`` at the client. Up:
    ``client_outputs``, ``layout``, and ``from_wire`` at the server. Each distinct input crosses once: samples that are
    captions of one picture share its representation.
    """

    samples: int | None = Field(
        default=None, ge=2, description="so many public samples cross in a round, drawn anew each; None: all of P"
    )
    extraction: Literal["eval", "train"] = Field(
        default="eval", description="mode and view in which exchanged representations are computed"
    )
    augment: bool = Field(default=False, description="training view of the public samples that participants train on")

    @property
    def exchanges_scores(self) -> bool:
        """Whether logits cross, not representations."""
        return False

    @property
    def largest_norm(self) -> float:
        """L2 norm that a row may have in an average; longer ones are scaled down to it."""
        return 1.0

    def require(self, plan: FederationPlan, *, learns_parts: bool = False) -> None:
        """Check that all participants have what crosses.

        Args:
            plan: of the federation.
            learns_parts: whether the method learns from public items without partner, and exchanges the gallery.

        Raises:
            ConfigError: somebody has not, or some of what is public has no effect.
        """
        if self.exchanges_scores:
            _require_classifications(plan)
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
            raise ConfigError(f"the public set has {len(server.public_set)} samples, too few; raise public.items")
        if self.samples is not None and self.samples > len(server.public_set):
            raise ConfigError(
                f"algorithm.public.samples is {self.samples}, but the public set has {len(server.public_set)}; "
                "lower it, or leave it out for all"
            )

    def has_classes(self, federation: FederationPlan | Server) -> bool:
        """Whether the public set has the classes of the server's task: as settings say, or, of a server, as it is."""
        if isinstance(federation, FederationPlan):
            return federation.public_has_classes
        return self.labels(federation, federation.public_set) is not None

    def labels(self, participant: Participant, samples: Samples) -> Int64[Tensor, " n"] | None:
        """True classes of public samples, where logits cross and the samples have them."""
        classes = samples.targets.get(_classification(participant).target) if self.exchanges_scores else None
        return None if classes is None else classes.long()

    def names_for(self, client: ClientInfo, names: Collection[str]) -> tuple[str, ...]:
        """Which of these outputs a client has: those of its modalities, and all logits."""
        return tuple(name for name in names if self.exchanges_scores or modality_of(name) in client.modalities)

    def bundle(self, outputs: Mapping[str, Tensor], order: str) -> PublicOutputs:
        return (Logits if self.exchanges_scores else Representations)(dict(outputs), order=order)

    # ---- outputs of a participant

    def drawn(self, participant: Participant) -> Samples:
        """The public samples that are exchanged in this round, in public order."""
        return participant.exchanged(self.samples)

    def outputs(self, participant: Participant) -> dict[str, Tensor]:
        """A participant's outputs on the exchanged samples, output -> [n, w], without gradient."""
        training = self.extraction == "train"
        outputs = self.outputs_of(participant, self.drawn(participant), training=training)
        for name, samples in participant.public.parts.items():
            outputs[name] = participant.represent(samples, training=training)[modality_of(name)]
        return outputs

    def outputs_of(self, participant: Participant, samples: Samples, *, training: bool = False) -> dict[str, Tensor]:
        """Outputs on any public samples, without gradient: in evaluation mode and view, or in those of training."""
        if not self.exchanges_scores:
            return participant.represent(samples, training=training)
        task, was_training, scores = _classification(participant), participant.model.training, []
        stream = participant.generator("scores") if training else None
        participant.model.train(training)
        try:
            with torch.no_grad():
                for index in torch.split(torch.arange(len(samples)), participant.setup.evaluation_batch):
                    batch = samples.batch(index, stream).to(participant.device)
                    scores.append(_scores(participant, task, participant.model, batch))
        finally:
            participant.model.train(was_training)
        return {task.target: torch.cat(scores)}

    def batch_outputs(
        self, participant: Participant, model: Embedder, batch: Batch, names: Collection[str]
    ) -> dict[str, Tensor]:
        """Outputs of a public batch by the participant's ``model``, output -> [b, w], with gradient."""
        if not self.exchanges_scores:
            with participant.autocast():
                return {name: model.represent(name, batch.inputs[name]) for name in names}
        task = _classification(participant)
        for name in names:
            if name != task.target:
                raise ConfigError(
                    f"scores of '{name}' are exchanged, but '{participant.name}' classifies '{task.target}'; "
                    "give all participants one target"
                )
        return {name: _scores(participant, task, model, batch) for name in names}

    # ---- how they cross

    def inverse_index(self, participant: Participant) -> dict[str, Int64[Tensor, " n"]]:
        """Output -> which of its distinct rows each sample has; nothing for outputs without repeated rows."""
        if self.extraction == "train":  # each sample is augmented in its own way
            return {}
        # of all modalities of the public set: a client may get those that it has not
        samples = self.drawn(participant)
        pairs = {} if self.exchanges_scores else {name: samples.distinct(name)[1] for name in samples.rows}
        return pairs | {name: part.distinct(modality_of(name))[1] for name, part in participant.public.parts.items()}

    def server_outputs(self, server: Server) -> PublicOutputs:
        """The server's own outputs on the samples that are exchanged in this round, output -> [n, w]."""
        # once a round: clients are compared with what the server was at its start, whatever it learns meanwhile
        return self.bundle(self.outputs(server), server.order(self.samples))

    def client_outputs(self, client: Client, order: str, names: Collection[str]) -> PublicOutputs:
        """The payload of a client's outputs with these names, or of these modalities in all parts of the public set."""
        # samples are drawn alike by all from seed and round, so that no index crosses
        wanted = set(names)
        outputs = {name: rows for name, rows in self.outputs(client).items() if wanted & {name, modality_of(name)}}
        return self.to_wire(client, outputs, order)

    def to_wire(self, participant: Participant, outputs: Mapping[str, Tensor], order: str) -> PublicOutputs:
        """The payload of outputs that depend on the input alone: each distinct input crosses once."""
        inverse = self.inverse_index(participant)
        return self.bundle({name: packed(rows, inverse.get(name)) for name, rows in outputs.items()}, order)

    def from_wire(self, participant: Participant, payload: PublicOutputs) -> dict[str, Tensor]:
        """The outputs [n, w] of a payload on all exchanged samples, on the participant's device.

        Raises:
            PayloadError: it has not a row for each distinct input.
        """
        inverse = self.inverse_index(participant)
        for name, rows in payload.items():
            count = distinct_count(inverse[name]) if name in inverse else len(rows)
            if len(rows) != count:
                raise PayloadError(f"'{name}' has {len(rows)} rows, but there are {count} distinct inputs of it")
        return {name: unpacked(rows.to(participant.device), inverse.get(name)) for name, rows in payload.items()}

    def layout(self, server: Server, server_outputs: PublicOutputs, field: str) -> dict[str, each[PublicOutputs]]:
        """Layout of the outputs that clients are asked for in a field of their replies (``like`` of ``Cohort.ask``)."""
        inverse = self.inverse_index(server)
        rows = {
            name: torch.empty(distinct_count(inverse[name]) if name in inverse else len(x), *x.shape[1:], device="meta")
            for name, x in server_outputs.items()
        }

        def of(client: ClientInfo) -> PublicOutputs:
            return self.bundle({name: rows[name] for name in self.names_for(client, rows)}, server_outputs.order)

        return {field: each(of)}

    # ---- training on public samples

    def passes(
        self, participant: Participant, purpose: str, epochs: int, size: int, samples: Samples | None = None
    ) -> Iterator[Batch]:
        """Batches of shuffled passes over public samples (None: all of P), to train on, as ``augment`` says."""
        participant.model.train()
        for epoch in participant.epochs(epochs):
            yield from participant.public_batches(f"{purpose}-{epoch}", size, augment=self.augment, samples=samples)

    def part_passes(
        self, participant: Participant, purpose: str, epochs: int, size: int, samples: Samples, outputs: Collection[str]
    ) -> Iterator[dict[str, Batch]]:
        """``passes`` over the pairs, as part "", and beside each batch as large a share of every other part."""
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
        """Output -> rows [b, w] with gradient, and the index of their samples, of batches by part, by ``model``."""
        rows: dict[str, tuple[Tensor, Tensor]] = {}
        for part, batch in batches.items():
            known = {modality_of(name): name for name in names if (name == part if part else "/" not in name)}
            outputs = self.batch_outputs(participant, model, batch, list(known))
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
    def exchanges_scores(self) -> bool:
        return self.form == "scores"

    @property
    def largest_norm(self) -> float:
        return (self.largest_score or 100.0) if self.exchanges_scores else 1.0

    def sends(self, declared: Declared) -> Declared:
        """Scores or representations, where either is declared; see ``Algorithm.sends``."""
        either = declared == Representations | Logits
        return (Logits if self.exchanges_scores else Representations) if either else declared

    def tau(self, temperature: float | None) -> float:
        """A softmax's temperature; None: 1 for scores, 0.1 for similarities."""
        return temperature or (1.0 if self.exchanges_scores else 0.1)

    def anchors(self, server_outputs: PublicOutputs, output: str) -> Tensor | None:
        """What rows [., d] of an output are compared with, [n, d]; None: they are logits."""
        return None if self.exchanges_scores else server_outputs[output]

    def outputs_for(self, public_outputs: PublicOutputs) -> Callable[[ClientInfo], PublicOutputs]:
        """Client -> those of the public outputs that it has itself."""

        def of(client: ClientInfo) -> PublicOutputs:
            names = self.names_for(client, public_outputs)
            return self.bundle({name: public_outputs[name] for name in names}, public_outputs.order)

        return of

    def asked(self, server_outputs: PublicOutputs) -> Callable[[ClientInfo], str]:
        """Client -> the outputs that it is asked for, as JSON."""
        return lambda client: json.dumps(self.names_for(client, server_outputs))


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


def clip_row_norms(values: Tensor, largest: float) -> Tensor:
    """Rows [n, w] whose norm is at most ``largest``: longer ones are scaled down, so that no sender outweighs others.

    A hundredth more is let pass, as honest rows of unit norm are that much longer after rounding on the wire.
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return torch.where(norms > 1.01 * largest, values * (largest / norms), values)


def _scores(participant: Participant, task: Classification, model: Embedder, batch: Batch) -> Float[Tensor, "b w"]:
    with participant.autocast():
        scores = task.scores(model, participant.head, batch)
    scores = scores.float()
    # no softmax feels a constant in a row, but norms and averages do
    return scores - scores.mean(1, keepdim=True)


def _classification(participant: Participant) -> Classification:
    return _require_classification(participant.task, participant.name)


def _require_classification(task: Task, participant: str) -> Classification:
    if not isinstance(task, Classification):
        raise ConfigError(
            f"algorithm.public.form is scores, but the task of '{participant}' is '{task.component_name()}'; give it a "
            "classification, or set algorithm.public.form=representations"
        )
    return task


def _require_classifications(plan: FederationPlan) -> None:
    if plan.server is not None:
        _require_classification(plan.server.task, SERVER)
    for client in plan.clients:
        if client.task != "classification":
            raise ConfigError(
                f"algorithm.public.form is scores, but client '{client.id}' has the task '{client.task}'; give all "
                "clients and the server one classification, or set algorithm.public.form=representations"
            )
