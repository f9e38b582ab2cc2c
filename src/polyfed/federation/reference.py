"""Reference representations that local training moves towards or away from, and that must not move themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.data.samples import Batch
from polyfed.models.model import Model


class Reference(Protocol):
    """Gives the reference representations of a batch of public samples."""

    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Representations of the batch in one modality, without gradient."""
        ...


class Stored:
    """Representations of the whole public set, modality -> [|P|, d], looked up by the index of a sample."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values

    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Rows of the stored matrix."""
        return self._values[modality][batch.index]


class FrozenCopy:
    """A copy of a model as it is now, in evaluation mode, asked batch by batch."""

    def __init__(self, model: Model) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, modality: str, batch: Batch) -> Float[Tensor, "b d"]:
        """Representations of the batch as it was loaded, augmentation included."""
        return self._model.represent(modality, batch.inputs[modality])
