"""Weights by likeness to the server's own modality."""

from __future__ import annotations

from typing import Annotated, ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting, log_share
from polyfed.core.effects import Where


class SED(Weighting):
    """Similarity-guided ensemble distillation (FedAFD, arXiv 2603.04890).

    log softmax_j(cos(u_k, g_j) / T) at j = k, g being the server's representations of the same modality. On class
    scores, log softmax(scores / T) of the true class. Cosines lie in [-1, 1]: at T = 1 a client at cosine 0.9 gets
    hardly more than twice the weight of one at 0.05.
    """

    needs_labels: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    temperature: float = Field(default=1.0, gt=0, description="T, by which cosines are divided; the paper has none: 1")
    mask_siblings: Annotated[bool, Where(OF_REPRESENTATIONS)] = Field(
        default=False, description="leave captions of the same picture out of the softmax"
    )

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        statistics = evidence.statistics(
            {"positive", "negatives_lse"}, tau=self.temperature, mask_siblings=self.mask_siblings
        )
        return log_share(statistics)
