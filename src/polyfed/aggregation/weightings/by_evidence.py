"""Weights over clients sample by sample, by how sure or right each is; see also ``gca``."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.tiles import working_dtype
from polyfed.aggregation.weighting import Evidence, Weighting, log_share


class SED(Weighting):
    """Similarity-guided ensemble distillation (FedAFD, arXiv 2603.04890).

    log softmax_j(cos(u_k, g_j) / T) at j = k, g being the server's representations of the same modality. On class
    scores, log softmax(scores / T) of the true class. Cosines lie in [-1, 1]: at T = 1 a client at cosine 0.9 gets
    hardly more than twice the weight of one at 0.05.
    """

    short_name: ClassVar[str] = "sed"

    needs_labels: ClassVar[bool] = True

    temperature: float = Field(default=1.0, gt=0, description="T, by which cosines are divided; the paper has none: 1")
    mask_siblings: bool = Field(default=False, description="leave captions of the same picture out of the softmax")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        statistics = evidence.statistics(
            {"positive", "negatives_lse"}, tau=self.temperature, mask_siblings=self.mask_siblings
        )
        return log_share(statistics)


class Entropy(Weighting):
    """Selective ensemble of FedGEMS (Cheng et al., arXiv 2110.11027): softmax over clients of 1 / H(p).

    p = softmax(x / tau) over classes, x being class scores; clients whose argmax is not the true class do not count.
    For representations x is the row of cosines to the server's representations of the same modality, and the true
    class the sample itself; that version is unpublished, and at tau = 1 its entropies are all near log |P|.
    """

    short_name: ClassVar[str] = "entropy"

    needs_labels: ClassVar[bool] = True

    tau: float = Field(default=1.0, gt=0, description="temperature of the softmax whose entropy is taken")
    floor: float = Field(
        default=1e-3, gt=0, description="smallest entropy told apart, in nats: 1 / H is 1 / floor at most"
    )
    mask_siblings: bool = Field(default=False, description="a caption of the same picture ranked first is right too")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """1 / H, since the softmax over clients is taken of it; -inf where the client is wrong."""
        truth = evidence.truth()
        statistics = evidence.statistics({"winner", "entropy"}, tau=self.tau, mask_siblings=self.mask_siblings)
        # a one-hot prediction has entropy 0, whose inverse would silence all others
        certainty = statistics["entropy"].clamp(min=self.floor).reciprocal()
        return certainty.masked_fill_(statistics["winner"] != truth, -math.inf)


class Margin(Weighting):
    """softmax over clients of (x_kk - max_{j != k} x_kj) / tau, x being cosines to the server's own modality.

    On class scores, of (largest - second largest) / tau, without labels. In the spirit of what FedAFD
    (arXiv 2603.04890) compares with as boundary-aware distillation weights (FedDFA), whose formula is unpublished.
    """

    short_name: ClassVar[str] = "margin"

    tau: float = Field(default=1.0, gt=0, description="temperature of the softmax over clients")
    mask_siblings: bool = Field(default=False, description="captions of the same picture are no rivals")

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


class Variance(Weighting):
    """Weighted consensus of FedET (Cho et al., IJCAI 2022): Var_j(x_kj), over classes.

    A client that tells classes apart spreads its scores. For representations x is the row of cosines to the server's
    representations of the same modality; that version is unpublished. Temperatures cancel.
    """

    short_name: ClassVar[str] = "variance"

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """Log of the variance; -inf where all scores are equal."""
        return evidence.statistics({"variance"})["variance"].log()
