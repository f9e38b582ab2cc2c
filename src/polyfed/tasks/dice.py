"""The Dice coefficient of predicted masks, picture by picture."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def dice(predicted: Bool[Tensor, "n h w"], masks: Bool[Tensor, "n h w"]) -> Float[Tensor, " n"]:
    """2 |A and B| / (|A| + |B|) of each picture, in float64.

    A picture whose mask is empty scores 1 if nothing is predicted in it, else 0 (FedAID, appendix B.2).
    """
    both = (predicted & masks).sum((1, 2)).double()
    sizes = predicted.sum((1, 2)).double() + masks.sum((1, 2)).double()
    return torch.where(sizes > 0, 2 * both / sizes.clamp(min=1), 1.0)


def mean_dice(predicted: Bool[Tensor, "n h w"], masks: Bool[Tensor, "n h w"]) -> Float[Tensor, ""]:
    """Mean over pictures in percent; NaN without pictures."""
    return 100.0 * dice(predicted, masks).mean()
