"""Losses of segmentation: focal loss (Lin et al., ICCV 2017), soft Dice, and FedAID's sum of both."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision


@in_full_precision
def focal(logits: Float[Tensor, "b h w"], masks: Shaped[Tensor, "b h w"], gamma: float = 2.0) -> Float[Tensor, ""]:
    """Mean over pixels of -(1 - p)^gamma log p, where p is the chance given to the pixel's true value.

    Args:
        logits: of the foreground.
        masks: 1 in the foreground, else 0.
        gamma: how much less pixels count that are right already; 0 gives the cross-entropy.
    """
    right = torch.where(masks > 0, logits, -logits)
    # in logarithms, as (1 - p)^gamma has no finite slope at p = 1 for gamma below 1
    return -((gamma * F.logsigmoid(-right)).exp() * F.logsigmoid(right)).mean()


@in_full_precision
def soft_dice(logits: Float[Tensor, "b h w"], masks: Shaped[Tensor, "b h w"], smooth: float = 1.0) -> Float[Tensor, ""]:
    """(2 sum p m + s) / (sum p + sum m + s) over all pixels of the batch: 1 where chances p are the masks m.

    Args:
        logits: of the foreground, p = sigmoid(logits).
        masks: 1 in the foreground, else 0.
        smooth: s > 0, so that a batch of empty masks has a value and a slope.
    """
    chances, truth = logits.sigmoid(), masks.to(logits.dtype)
    # over the batch, not by picture: an empty mask would make a picture's share arbitrary
    return (2 * (chances * truth).sum() + smooth) / (chances.sum() + truth.sum() + smooth)


@in_full_precision
def focal_dice(
    logits: Float[Tensor, "b h w"],
    masks: Shaped[Tensor, "b h w"],
    *,
    focal_weight: float = 10.0,
    dice_weight: float = 1.0,
    gamma: float = 2.0,
    smooth: float = 1.0,
) -> Float[Tensor, ""]:
    """focal_weight focal - dice_weight log(soft Dice) (FedAID, appendix B.2, after MGCA, NeurIPS 2022)."""
    return focal_weight * focal(logits, masks, gamma) - dice_weight * soft_dice(logits, masks, smooth).log()
