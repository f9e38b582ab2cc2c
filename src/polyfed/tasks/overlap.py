"""Overlap of predicted masks with true ones: Dice and IoU of classes, counted picture by picture."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Counts = Int[Tensor, "*n classes 3"]
"""Of each class: pixels that are predicted and true, predicted, true."""


def overlaps(predicted: Int[Tensor, "n h w"], masks: Int[Tensor, "n h w"], classes: int) -> Int[Tensor, "n classes 3"]:
    """``Counts`` of each picture.

    A pixel whose true value is no class is left out; one whose predicted value is none is right nowhere.
    """
    predicted = predicted.where((masks >= 0) & (masks < classes), -1)
    # class by class: what is held does not grow with their number
    sides = ((predicted == number, masks == number) for number in range(classes))
    return torch.stack([torch.stack([(a & b).sum((1, 2)), a.sum((1, 2)), b.sum((1, 2))], 1) for a, b in sides], 1)


def dice(counts: Counts) -> Float[Tensor, "*n classes"]:
    """2 |A and B| / (|A| + |B|) in float64; NaN where a class is neither predicted nor true."""
    both, predicted, true = counts.double().unbind(-1)
    return 2 * both / (predicted + true)


def iou(counts: Counts) -> Float[Tensor, "*n classes"]:
    """|A and B| / |A or B| in float64; NaN likewise."""
    both, predicted, true = counts.double().unbind(-1)
    return both / (predicted + true - both)


def dice_of_constant(counts: Int[Tensor, "classes 3"], first: int = 0) -> Float[Tensor, ""]:
    """Mean Dice of the best mask that has one class everywhere: what predictions must beat; 1 where it is undefined.

    Args:
        counts: of all pictures.
        first: the first class that counts in the mean.
    """
    true = counts[:, 2]
    everywhere = torch.eye(len(true), dtype=torch.bool, device=true.device)
    constant = torch.stack([true * everywhere, true.sum() * everywhere, true.expand(len(true), -1)], -1)
    return dice(constant)[:, first:].nanmean(1).nan_to_num(1.0).max()


def mean_dice(predicted: Bool[Tensor, "n h w"], masks: Bool[Tensor, "n h w"]) -> Float[Tensor, ""]:
    """Dice of each picture, then the mean, in percent; NaN without pictures.

    A picture whose mask is empty scores 1 if nothing is predicted in it, else 0 (FedAID, appendix B.2).
    """
    by_picture = dice(overlaps(predicted.int(), masks.int(), 2))[:, 1]
    return 100.0 * by_picture.nan_to_num(1.0).mean()
