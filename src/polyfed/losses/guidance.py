"""Guidance by anchor representations (FedAID, arXiv 2404.03854, Eq. 1 and 5; FedDRA)."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.losses.info_nce import info_nce
from polyfed.losses.precision import in_full_precision

GuidanceReduction = Literal["sum", "mean", "element"]


@in_full_precision
def squared_distance(
    z: Float[Tensor, "b d"], anchors: Float[Tensor, "b d"], reduction: GuidanceReduction = "sum"
) -> Float[Tensor, ""]:
    """Sum over the batch of ||z - z*||^2 (Eq. 1); gradient to both.

    Args:
        z: representations.
        anchors: z*, in the same order.
        reduction: ``sum`` over samples, their ``mean``, or the mean over all b x d elements (FedDRA's released code).
    """
    squares = (z - anchors).square()
    if reduction == "element":
        return squares.mean()
    distances = squares.sum(1)
    return distances.sum() if reduction == "sum" else distances.mean()


def contrastive_guidance(
    z: Float[Tensor, "b d"],
    anchors: Float[Tensor, "b d"],
    temperature: float,
    items: Int64[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """InfoNCE between representations and their anchors, both of unit norm: the ablation of FedAID's Table 17.

    ``items`` as in ``info_nce``.
    """
    return info_nce(z, anchors, 1.0 / temperature, items)
