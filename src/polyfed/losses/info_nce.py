"""Symmetric InfoNCE of CLIP (Radford et al. 2021)."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision

MAX_SCALE = 100.0
"""Upper bound of the logit scale 1 / temperature; the lower bound is 1."""


@in_full_precision
def info_nce(
    u: Float[Tensor, "b d"],
    v: Float[Tensor, "b d"],
    scale: Float[Tensor, ""] | float,
    items: Int[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """(CE(S, id) + CE(S^T, id)) / 2 with S = scale u v^T, the mean over the batch.

    Args:
        u: representations of one modality, unit L2 norm.
        v: representations of the other, in the same order, unit L2 norm.
        scale: 1 / temperature.
        items: id of the item behind each pair; rows of the same item (two captions of one image) are then
            left out of each other's denominators.
    """
    logits = scale * (u @ v.T)
    target = torch.arange(len(u), device=u.device)
    if items is not None:
        siblings = (items[:, None] == items[None, :]).fill_diagonal_(False)
        logits = logits.masked_fill(siblings, -math.inf)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class InfoNCE(nn.Module):
    """InfoNCE with its logit scale, learnable as ``log_scale`` or fixed, kept in [1, 100].

    >>> loss = InfoNCE(temperature=0.07)
    >>> round(float(loss.scale), 2)
    14.29
    """

    log_scale: Tensor

    def __init__(self, temperature: float = 0.07, *, learnable: bool = True) -> None:
        super().__init__()
        log_scale = torch.tensor(-math.log(temperature))
        if learnable:
            self.log_scale = nn.Parameter(log_scale)
        else:
            self.register_buffer("log_scale", log_scale)

    @property
    def scale(self) -> Float[Tensor, ""]:
        """Logit scale 1 / temperature.

        An optimiser step may have left the range; the stored value itself is brought back, as CLIP does,
        because a clamp in the graph would cut the gradient that leads back.
        """
        with torch.no_grad():
            self.log_scale.clamp_(0.0, math.log(MAX_SCALE))
        return self.log_scale.exp()

    def forward(
        self, u: Float[Tensor, "b d"], v: Float[Tensor, "b d"], items: Int[Tensor, " b"] | None = None
    ) -> Float[Tensor, ""]:
        """Loss of a batch of pairs; see ``info_nce``."""
        return info_nce(u, v, self.scale, items)
