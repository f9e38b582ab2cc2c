"""Weights by distance from the decision boundary."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.tiles import working_dtype
from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting
from polyfed.core.effects import Where


class Margin(Weighting):
    """softmax over clients of (x_kk - max_{j != k} x_kj) / tau, x being cosines to the server's own modality.

    On class scores, of (largest - second largest) / tau, without labels. In the spirit of what FedAFD
    (arXiv 2603.04890) compares with as boundary-aware distillation weights (FedDFA), whose formula is unpublished.
    """

    compares: ClassVar[bool] = True

    tau: float = Field(default=1.0, gt=0, description="temperature of the softmax over clients")
    mask_siblings: Annotated[bool, Where(OF_REPRESENTATIONS)] = Field(
        default=False, description="captions of the same picture are no rivals"
    )

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """The margin over tau; 0 for a sample, or a class, that has no rival."""
        if evidence.is_scores:
            scores = evidence.values.to(working_dtype(evidence.values, evidence.values))
            # of a single class the first is also the last: no lead
            leading = scores.topk(min(2, scores.shape[1]), dim=1).values
            return torch.sub(leading[:, 0], leading[:, -1]) / self.tau
        statistics = evidence.statistics({"positive", "best_negative"}, tau=self.tau, mask_siblings=self.mask_siblings)
        margin = statistics["positive"] - statistics["best_negative"]
        return margin.masked_fill_(statistics["best_negative"] == -math.inf, 0)
