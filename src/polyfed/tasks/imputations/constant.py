"""What stands for a lacking modality, the same for all samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from polyfed.tasks.imputation import Embeddings, Imputation, Imputer


class LeaveOut(Imputation):
    """Nothing: the mean is over the modalities that a sample has."""

    short_name: ClassVar[str] = "drop"

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _LeftOut(modalities, self.dropout)


class _LeftOut(Imputer):
    def share(self, parts: Embeddings, count: int) -> Float[Tensor, "b 1"]:
        times = torch.bincount(torch.cat([part.places for part in parts.values()]), minlength=count)
        return times[:, None].to(next(iter(parts.values())).values.dtype)


class Zero(Imputation):
    """Zeros, so that a sample with fewer modalities says less."""

    short_name: ClassVar[str] = "zero"

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return Imputer(modalities, self.dropout)


class Placeholder(Imputation):
    """A vector that is learnt, one a modality."""

    short_name: ClassVar[str] = "placeholder"

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Placeholders(dim, modalities, self.dropout)


class _Placeholders(Imputer):
    def __init__(self, dim: int, modalities: Sequence[str], dropout: float) -> None:
        super().__init__(modalities, dropout)
        self.vectors = nn.ParameterDict({name: nn.Parameter(torch.zeros(dim)) for name in modalities})

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        vector: Tensor = self.vectors[modality]
        return vector.expand(len(places), -1)
