"""Training on public samples: references for contrasts, and public batches among private ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.aggregation.distinct import distinct_count
from polyfed.data.samples import Batch
from polyfed.models.model import Model

Reference = Callable[[str, Batch], Float[Tensor, "b d"]]
"""Reference representations of a batch of public samples in a modality, without gradient."""


class Stored:
    """Representations of the exchanged samples, modality -> [n, d], looked up by the index of a sample."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        return self._values[modality][batch.index]


class FrozenCopy:
    """A copy of a model as it is now, in evaluation mode."""

    def __init__(self, model: Model) -> None:
        # evaluation mode: its batch statistics must not move with its inputs
        self._model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Representations of the batch as it was loaded, augmentation included."""
        return self._model.represent(modality, batch.inputs[modality])


class Remembered:
    """A frozen copy of a model as it is now, that encodes each distinct public input on its first request.

    Args:
        model: Model that is copied.
        inverse_index: Maps each requested modality to the distinct input of each sample.
    """

    def __init__(self, model: Model, inverse_index: Mapping[str, Int64[Tensor, " n"]]) -> None:
        self._copy, self._inverse_index = FrozenCopy(model), inverse_index
        counts = {name: distinct_count(of) for name, of in inverse_index.items()}
        self._rows = {name: torch.empty(count, model.dim, device=model.device) for name, count in counts.items()}
        self._known = {
            name: torch.zeros(count, dtype=torch.bool, device=model.device) for name, count in counts.items()
        }

    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Representations of a batch in the evaluation view."""
        rows, known = self._rows[modality], self._known[modality]
        own = self._inverse_index[modality].to(rows.device)[batch.index]
        new = (~known[own]).nonzero().squeeze(1)
        if len(new):
            asked = replace(batch, inputs={modality: batch.inputs[modality][new]})
            rows[own[new]] = self._copy(modality, asked)
            known[own[new]] = True
        return rows[own]


Pair = tuple[Batch | None, Batch | None]
"""The private and the public batch of one optimiser step; either may be missing."""


def interleave(
    private: Iterator[Batch], public: Iterator[Batch], steps: int, wanted: int | None = None
) -> Iterator[Pair]:
    """Spread ``wanted`` public batches evenly over the private batches of an epoch.

    With fewer public than private batches some steps have no public one; with more, some have nothing else.

    Args:
        private: Private batches.
        public: Public batches without end.
        steps: Number of private batches.
        wanted: Number of public batches; None: as many as private ones.
    """
    wanted = wanted or steps
    given = 0
    for done, batch in enumerate(private, start=1):
        # due after ``done`` of ``steps``, rounded up, minus those given before
        due = -(-wanted * done // steps) - given
        given += due
        yield batch, next(public) if due else None
        yield from ((None, more) for more in islice(public, max(due - 1, 0)))
