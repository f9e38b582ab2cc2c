"""Training on public samples: outputs that participants exchange there, references, and batches among private ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.aggregation.distinct import distinct_count
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.federation.client import SERVER, ClientInfo
from polyfed.federation.participant import Participant
from polyfed.federation.plan import FederationPlan
from polyfed.models.model import Embedder, Model
from polyfed.tasks.classification import Classification
from polyfed.tasks.task import Task
from polyfed.wire.payload import Logits, Representations

T = TypeVar("T")
PublicOutputs = Representations | Logits


@dataclass(frozen=True)
class RepresentationKind:
    """Representations of unit norm, by modality.

    Attributes:
        largest: L2 norm that a row may have in an average; longer ones are scaled down to it.
    """

    largest: float = 1.0

    def of(self, participant: Participant, samples: Samples, *, training: bool = False) -> dict[str, Tensor]:
        """Those of all samples, modality -> [n, d], without gradient, on the participant's device."""
        return participant.represent(samples, training=training)

    def places(self, samples: Samples) -> dict[str, Int64[Tensor, " n"]]:
        """Modality -> place of each sample among the distinct inputs, which are all that cross: captions of one picture
        share it. Of all modalities of the public set, as a client may get those of others."""
        return {name: samples.distinct(name)[1] for name in samples.rows}

    def outputs(
        self, participant: Participant, model: Embedder, batch: Batch, channels: Sequence[str]
    ) -> dict[str, Tensor]:
        """Those of a batch of public samples by the participant's ``model``, modality -> [b, d], with gradient."""
        with participant.autocast():
            return {name: model.represent(name, batch.inputs[name]) for name in channels}

    def bundle(self, values: Mapping[str, Tensor], order: str) -> Representations:
        return Representations(dict(values), order=order)

    def channels(self, client: ClientInfo, known: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in known if modality_of(name) in client.modalities)

    def labels(self, participant: Participant, samples: Samples) -> Int64[Tensor, " n"] | None:
        return None

    def anchors(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return known

    def require(self, plan: FederationPlan) -> None:
        """Raise nothing: everybody has representations."""


@dataclass(frozen=True)
class LogitKind:
    """Class scores (logits) of one classification that all participants have.

    Attributes:
        largest: norm of a row of scores at most; its mean is taken off first, which no softmax feels.
    """

    largest: float = 100.0

    def of(self, participant: Participant, samples: Samples, *, training: bool = False) -> dict[str, Tensor]:
        """Those of all samples, target -> [n, classes], in evaluation mode (or training mode and view)."""
        task, was_training = _classification(participant), participant.model.training
        stream = participant.generator("scores") if training else None
        participant.model.train(training)
        parts = []
        try:
            with torch.no_grad():
                for index in torch.split(torch.arange(len(samples)), participant.evaluation_batch):
                    batch = samples.batch(index, stream).to(participant.device)
                    parts.append(self._scores(participant, task, participant.model, batch))
        finally:
            participant.model.train(was_training)
        return {task.target: torch.cat(parts)}

    def places(self, samples: Samples) -> dict[str, Int64[Tensor, " n"]]:
        return {}

    def outputs(
        self, participant: Participant, model: Embedder, batch: Batch, channels: Sequence[str]
    ) -> dict[str, Tensor]:
        """Those of a batch by the participant's ``model``, target -> [b, classes], with gradient."""
        task = _classification(participant)
        foreign = [name for name in channels if name != task.target]
        if foreign:
            raise ConfigError(
                f"scores of '{foreign[0]}' are exchanged, but '{participant.name}' classifies '{task.target}'; "
                "give all participants one target"
            )
        return {name: self._scores(participant, task, model, batch) for name in channels}

    def bundle(self, values: Mapping[str, Tensor], order: str) -> Logits:
        return Logits(dict(values), order=order)

    def channels(self, client: ClientInfo, known: Sequence[str]) -> tuple[str, ...]:
        """The names of the server's logits, which all have."""
        return tuple(known)

    def labels(self, participant: Participant, samples: Samples) -> Int64[Tensor, " n"] | None:
        classes = samples.targets.get(_classification(participant).target)
        return None if classes is None else classes.long()

    def anchors(self, known: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {}

    def require(self, plan: FederationPlan) -> None:
        """Check that server and clients classify.

        Raises:
            ConfigError: one does not.
        """
        if plan.server is not None:
            _checked(plan.server.task, SERVER)
        for client in plan.clients:
            if client.task != "classification":
                raise ConfigError(
                    f"algorithm.public.form is scores, but client '{client.id}' has the task '{client.task}'; give all "
                    "clients and the server one classification, or set algorithm.public.form=representations"
                )

    def _scores(self, participant: Participant, task: Classification, model: Embedder, batch: Batch) -> Tensor:
        with participant.autocast():
            scores = task.scores(model, participant.head, batch)
        scores = scores.float()
        # no softmax feels a constant in a row, but norms and averages do
        return scores - scores.mean(1, keepdim=True)


OutputKind = RepresentationKind | LogitKind


# ---- outputs of the pairs are called after their modality, those of other parts <part>/<modality>


GALLERY, UNPAIRED = "gallery", "unpaired"
"""The other parts."""


def modality_of(output: str) -> str:
    return output.rpartition("/")[2]


def part_of(output: str) -> str:
    """The part of the public set that an output belongs to; empty for the pairs."""
    return output.rpartition("/")[0]


def of_part(outputs: Mapping[str, T], part: str = "") -> dict[str, T]:
    """Modality (or target) -> the outputs of one part of the public set; of its pairs without a name."""
    return {modality_of(name): value for name, value in outputs.items() if part_of(name) == part}


def _classification(participant: Participant) -> Classification:
    return _checked(participant.task, participant.name)


def _checked(task: Task, participant: str) -> Classification:
    if not isinstance(task, Classification):
        raise ConfigError(
            f"algorithm.public.form is scores, but the task of '{participant}' is '{task.component_name()}'; give it a "
            "classification, or set algorithm.public.form=representations"
        )
    return task


def clip_row_norms(values: Tensor, largest: float) -> Tensor:
    """Rows [n, w] whose norm is at most ``largest``: longer ones are scaled down, so that no sender outweighs others.

    A hundredth more is let pass, as honest rows of unit norm are that much longer after rounding on the wire.
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return torch.where(norms > 1.01 * largest, values * (largest / norms), values)


# ---- representations that local training moves towards or away from, and that must not move themselves


Reference = Callable[[str, Batch], Float[Tensor, "b d"]]
"""Gives the reference representations of a batch of public samples in a modality, without gradient."""


class Stored:
    """Representations of the whole public set, modality -> [|P|, d], looked up by the index of a sample."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        return self._values[modality][batch.index]


class FrozenCopy:
    """A copy of a model as it is now, in evaluation mode, asked batch by batch."""

    def __init__(self, model: Model) -> None:
        # evaluation mode: its batch statistics must not move with what it is asked
        self._model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Representations of the batch as it was loaded, augmentation included."""
        return self._model.represent(modality, batch.inputs[modality])


class Remembered:
    """A frozen copy of a model as it is now, that encodes a distinct input of public samples when first asked for it.

    Args:
        model: which is copied.
        places: modality -> which distinct input each sample has; all modalities that are asked for.
    """

    def __init__(self, model: Model, places: Mapping[str, Int64[Tensor, " n"]]) -> None:
        self._copy, self._places = FrozenCopy(model), places
        counts = {name: distinct_count(of) for name, of in places.items()}
        self._rows = {name: torch.empty(count, model.dim, device=model.device) for name, count in counts.items()}
        self._known = {
            name: torch.zeros(count, dtype=torch.bool, device=model.device) for name, count in counts.items()
        }

    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Representations of a batch in the evaluation view."""
        rows, known = self._rows[modality], self._known[modality]
        places = self._places[modality].to(rows.device)[batch.index]
        new = (~known[places]).nonzero().squeeze(1)
        if len(new):
            asked = replace(batch, inputs={modality: batch.inputs[modality][new]})
            rows[places[new]] = self._copy(modality, asked)
            known[places[new]] = True
        return rows[places]


# ---- public batches among private ones

Pair = tuple[Batch | None, Batch | None]
"""The private and the public batch of one optimiser step; either may be missing."""


def interleave(
    private: Iterator[Batch], public: Iterator[Batch], steps: int, wanted: int | None = None
) -> Iterator[Pair]:
    """Spread ``wanted`` public batches evenly over the private batches of an epoch.

    With fewer public than private batches some steps have no public one; with more, some have nothing else.

    Args:
        private: the private batches.
        public: public batches without end.
        steps: how many private batches there are.
        wanted: how many public batches; None: as many as private ones.
    """
    wanted = wanted or steps
    given = 0
    for done, batch in enumerate(private, start=1):
        # how many are due after ``done`` of ``steps``, rounded up, less those that were given
        due = -(-wanted * done // steps) - given
        given += due
        yield batch, next(public) if due else None
        yield from ((None, more) for more in islice(public, max(due - 1, 0)))
