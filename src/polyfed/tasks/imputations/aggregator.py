"""Learnt vectors for lacking modalities, and weights that say which modalities to go by (FedMAC)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.tasks.imputation import Embeddings, Imputation, Imputer


class Aggregator(Imputation):
    """FedMAC-like (Nguyen et al., NCA 2024): a learnt vector in place of a lacking modality, and a weighted mean.

    z_m is what the sample has in modality m, or the modality's imputation embedding e_m where it lacks it. Every
    modality is reconstructed from the mean of the others, r_m = W_m mean_{n != m} z_n, and counts by how well that
    succeeds: sum_m softmax_m(cos(r_m, z_m) / tau) z_m.

    From the paper: imputation embeddings, an aggregator that reweights modalities by cross-modal reconstruction, and
    the contrasts of the algorithm ``fedmac``. Ours, as its equations could not be checked: linear reconstruction from a
    mean, cosines, and tau.
    """

    temperature: float = Field(default=1.0, gt=0, le=100, description="tau, of the cosines; large: the plain mean")

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Aggregation(self, dim, modalities)


class _Aggregation(Imputer):
    def __init__(self, settings: Aggregator, dim: int, modalities: Sequence[str]) -> None:
        super().__init__(modalities, settings.dropout)
        self.temperature = settings.temperature
        # of usual length and not 0, which has no direction
        self.vectors = nn.ParameterDict({name: nn.Parameter(torch.randn(dim) / dim**0.5) for name in modalities})
        self.reconstruct = nn.ModuleDict({name: nn.Linear(dim, dim, bias=False) for name in modalities})

    def fuse(self, parts: Embeddings, count: int) -> Float[Tensor, "b d"]:
        z = torch.stack([self.filled(name, parts, count) for name in self.modalities])
        others = (z.sum(0) - z) / (len(z) - 1)
        made = torch.stack([self.reconstruct[name](own) for name, own in zip(self.modalities, others, strict=True)])
        shares = (F.cosine_similarity(made.float(), z, dim=-1) / self.temperature).softmax(0)
        return (shares[..., None] * z).sum(0)

    def filled(self, modality: str, parts: Embeddings, count: int) -> Float[Tensor, "b d"]:
        """Embeddings of all samples, the vector of the modality where they lack it."""
        vectors: Tensor = self.vectors[modality].float().expand(count, -1)
        if modality not in parts:
            return vectors
        return vectors.index_copy(0, parts[modality].places, parts[modality].values.float())
