"""Symmetric InfoNCE of CLIP (Radford et al. 2021)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision

_MAX_SCALE = 100.0  # of 1 / temperature, as in CLIP; at least 1


Reduction = Literal["mean", "sum"]


@in_full_precision
def info_nce(
    u: Float[Tensor, "b d"],
    v: Float[Tensor, "b d"],
    scale: Float[Tensor, ""] | float,
    items: Int[Tensor, " b"] | None = None,
    *,
    weight: float = 0.5,
    reduction: Reduction = "mean",
) -> Float[Tensor, ""]:
    """(CE(S, id) + CE(S^T, id)) / 2 with S = scale u v^T, the mean over the batch.

    Args:
        u: representations of one modality, unit L2 norm.
        v: representations of the other, in the same order, unit L2 norm.
        scale: 1 / temperature; a higher one sharpens the choice among the batch.
        items: id of the item behind each pair; rows of the same item (two captions of one image) are then
            left out of each other's denominators.
        weight: see ``pair_cross_entropy``.
        reduction: likewise.

    >>> u = torch.eye(2)
    >>> [round(float(info_nce(u, u, scale)), 3) for scale in (1.0, 10.0)]
    [0.313, 0.0]
    """
    return pair_cross_entropy(scale * (u @ v.T), items, weight=weight, reduction=reduction)


@in_full_precision
def pair_cross_entropy(
    logits: Float[Tensor, "b b"],
    items: Int[Tensor, " b"] | None = None,
    *,
    weight: float = 0.5,
    reduction: Reduction = "mean",
) -> Float[Tensor, ""]:
    """weight CE(S, id) + (1 - weight) CE(S^T, id): find the column of a row, and the row of a column.

    Args:
        logits: S, how well each of one side fits each of the other; pairs on the diagonal.
        items: see ``info_nce``.
        weight: of the direction from rows to columns (ConVIRT: 0.75).
        reduction: of the two directions; ``sum`` is twice the ``mean``, as in FedAID's, GLoRIA's and MGCA's code.

    >>> logits = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    >>> [round(float(pair_cross_entropy(logits, weight=weight)), 3) for weight in (0.5, 1.0)]
    [0.753, 0.693]
    """
    target = torch.arange(len(logits), device=logits.device)
    if items is not None:
        # of one item: as negatives they would push right answers apart
        siblings = (items[:, None] == items[None, :]).fill_diagonal_(False)
        logits = logits.masked_fill(siblings, -math.inf)
    mean = weight * F.cross_entropy(logits, target) + (1 - weight) * F.cross_entropy(logits.T, target)
    return mean if reduction == "mean" else 2 * mean


class InfoNCE(nn.Module):
    """InfoNCE with its logit scale, learnable as ``log_scale`` or fixed, kept in [1, 100].

    >>> loss = InfoNCE(temperature=0.07)
    >>> round(float(loss.scale), 2)
    14.29
    """

    log_scale: Tensor

    def __init__(
        self, temperature: float = 0.07, *, learnable: bool = True, weight: float = 0.5, reduction: Reduction = "mean"
    ) -> None:
        super().__init__()
        self.weight, self.reduction = weight, reduction
        log_scale = torch.tensor(-math.log(temperature))
        if learnable:
            self.log_scale = nn.Parameter(log_scale)
        else:
            # a buffer: part of the state, sent and saved, but no parameter to train
            self.register_buffer("log_scale", log_scale)

    @property
    def scale(self) -> Float[Tensor, ""]:
        """Logit scale 1 / temperature.

        An optimiser step may have left the range; the stored value itself is brought back, as CLIP does,
        because a clamp in the graph would cut the gradient that leads back.
        """
        with torch.no_grad():
            self.log_scale.clamp_(0.0, math.log(_MAX_SCALE))
        return self.log_scale.exp()

    def forward(
        self, u: Float[Tensor, "b d"], v: Float[Tensor, "b d"], items: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, ""]:
        """Loss of a batch of pairs; see ``info_nce``."""
        return info_nce(u, v, self.scale, items, weight=self.weight, reduction=self.reduction)
