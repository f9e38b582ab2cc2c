"""Class means of the lacking modality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.tasks.imputation import Embeddings, Imputation, Imputer, PresentEmbeddings, mean_of

_LEAST = 1e-3  # mass of a running mean below which it is none


class ClassPrototypes(Imputation):
    """The mean embeddings of the classes in the lacking modality, by how near the sample is to them in others.

    sum_c softmax_c(cos(z_a, m_a,c) / tau) m_b,c for what a sample has, a, and lacks, b; the mean over all that it has.
    Means are running ones of training samples, and are averaged among clients as other weights are.
    """

    is_per_sample: ClassVar[bool] = False

    temperature: float = Field(default=0.1, gt=0, description="tau, of the cosines")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of the running means, a batch")

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _PrototypeMix(self, dim, modalities, classes)


class _PrototypeMix(Imputer):
    running_sums: Tensor
    running_mass: Tensor

    def __init__(self, settings: ClassPrototypes, dim: int, modalities: Sequence[str], classes: int) -> None:
        super().__init__(modalities, settings.dropout)
        self.settings = settings
        # a running mean is sums / mass: as both are bounded and average among clients, so does it
        self.register_buffer("running_sums", torch.zeros(len(modalities), classes, dim))
        self.register_buffer("running_mass", torch.zeros(len(modalities), classes))

    @torch.no_grad()
    def observe(self, parts: Embeddings, labels: Int64[Tensor, " b"]) -> None:
        for name, part in parts.items():
            row, classes = self.modalities.index(name), labels[part.places]
            shown = torch.zeros_like(self.running_mass[row]).index_add(
                0, classes, torch.ones_like(classes, dtype=torch.float32)
            )
            added = torch.zeros_like(self.running_sums[row]).index_add(0, classes, part.values.detach().float())
            keep = torch.where(shown > 0, self.settings.momentum, 1.0)  # a class that is not there stays as it is
            self.running_mass[row] = keep * self.running_mass[row] + (1 - keep)
            mean = added / shown.clamp(min=1)[:, None]
            self.running_sums[row] = keep[:, None] * self.running_sums[row] + (1 - keep)[:, None] * mean

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        goal, mixed = self.modalities.index(modality), {}
        for name, part in parts.items():
            row = self.modalities.index(name)
            # noise and rules may leave a trace of a class that nobody has
            known = ((self.running_mass[row] > _LEAST) & (self.running_mass[goal] > _LEAST)).nonzero()[:, 0]
            if name == modality or not len(known):
                continue
            means = self.running_sums[:, known] / self.running_mass[:, known, None]
            near = F.normalize(part.values.float(), dim=-1) @ F.normalize(means[row], dim=-1).T
            mixed[name] = PresentEmbeddings((near / self.settings.temperature).softmax(-1) @ means[goal], part.places)
        return mean_of(mixed, parts, count)[places]
