"""Rows weighted by agreement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.robust_rule import BufferingRule, stacked
from polyfed.aggregation.rules.median import Median


class Agreement(BufferingRule):
    """Rows of representations, logits or prototypes weighted by agreement with the median, sample by sample.

    The weight of client c on sample k is softmax over the clients of cos(r_ck, m_k) / tau with the coordinate-wise
    median m_k; rows longer than the median norm on a sample are shortened to it. Whoever is right about some samples
    and false about others counts for the former (polyfed's own).
    """

    rows_only: ClassVar[bool] = True

    tau: float = Field(
        default=0.1, gt=0, description="temperature: small ones listen to the nearest to the median alone"
    )

    def combined(self, values: Sequence[Sequence[Tensor]], false: int) -> list[Tensor]:
        medians = Median().combined(values, false)
        return [self._mean(stacked(rows), m) for rows, m in zip(zip(*values, strict=True), medians, strict=True)]

    def _mean(self, rows: Float[Tensor, "n P d"], median: Float[Tensor, "P d"]) -> Float[Tensor, "P d"]:
        weights = (F.cosine_similarity(rows, median[None], dim=-1) / self.tau).softmax(0)
        norms = torch.linalg.vector_norm(rows, dim=-1)
        usual = norms.quantile(0.5, dim=0)
        factors = weights * (usual / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)
        mean: Tensor = (factors[..., None] * rows).sum(0)
        return mean
