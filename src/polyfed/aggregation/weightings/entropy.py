"""Weights of the right clients by their certainty."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting
from polyfed.core.effects import Where


class Entropy(Weighting):
    """Selective ensemble of FedGEMS (Cheng et al., arXiv 2110.11027): softmax over clients of 1 / H(p).

    p = softmax(x / tau) over classes, x being class scores; clients whose argmax is not the true class do not count.
    For representations x is the row of cosines to the server's representations of the same modality, and the true
    class the sample itself; that version is unpublished, and at tau = 1 its entropies are all near log |P|.
    """

    needs_labels: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    tau: float = Field(default=1.0, gt=0, description="temperature of the softmax whose entropy is taken")
    floor: float = Field(
        default=1e-3, gt=0, description="smallest entropy told apart, in nats: 1 / H is 1 / floor at most"
    )
    mask_siblings: Annotated[bool, Where(OF_REPRESENTATIONS)] = Field(
        default=False, description="a caption of the same picture ranked first is right too"
    )

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """1 / H, since the softmax over clients is taken of it; -inf where the client is wrong."""
        truth = evidence.truth()
        statistics = evidence.statistics({"winner", "entropy"}, tau=self.tau, mask_siblings=self.mask_siblings)
        # a one-hot prediction has entropy 0, whose inverse would silence all others
        certainty = statistics["entropy"].clamp(min=self.floor).reciprocal()
        return certainty.masked_fill_(statistics["winner"] != truth, -math.inf)
