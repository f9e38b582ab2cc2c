"""Losses of segmentation: focal loss (Lin et al., ICCV 2017), soft Dice, FedAID's sum of both, and cross-entropy with
Dice."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision


@in_full_precision
def focal(logits: Float[Tensor, "b h w"], masks: Shaped[Tensor, "b h w"], gamma: float = 2.0) -> Float[Tensor, ""]:
    """Mean over pixels of -(1 - p)^gamma log p, where p is the predicted probability of the pixel's true value.

    Args:
        logits: Logits of the foreground.
        masks: 1 in the foreground, else 0.
        gamma: Focus; a higher one counts less what is right already; 0 gives the cross-entropy.

    >>> logits, masks = torch.tensor([[[2.0, -2.0]]]), torch.tensor([[[1.0, 0.0]]])
    >>> [round(float(focal(logits, masks, gamma)), 4) for gamma in (0.0, 2.0)]
    [0.1269, 0.0018]
    """
    right = torch.where(masks > 0, logits, -logits)
    # in logarithms, as (1 - p)^gamma has no finite slope at p = 1 for gamma below 1
    return -((gamma * F.logsigmoid(-right)).exp() * F.logsigmoid(right)).mean()


@in_full_precision
def soft_dice(logits: Float[Tensor, "b h w"], masks: Shaped[Tensor, "b h w"], smooth: float = 1.0) -> Float[Tensor, ""]:
    """(2 sum p m + s) / (sum p + sum m + s) over all pixels of the batch: 1 where chances p are the masks m.

    Args:
        logits: Logits of the foreground, p = sigmoid(logits).
        masks: 1 in the foreground, else 0.
        smooth: Constant s > 0, so that a batch of empty masks has a value and a slope.

    >>> masks = torch.tensor([[[1.0, 0.0]]])
    >>> [round(float(soft_dice(logit * (2 * masks - 1), masks)), 2) for logit in (9.0, 0.0, -9.0)]
    [1.0, 0.67, 0.33]
    """
    # over the batch, not per image: an empty mask would make an image's share arbitrary
    return _shares(logits.sigmoid(), masks.to(logits.dtype), (0, 1, 2), smooth)


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
    """focal_weight focal - dice_weight log(soft Dice) (FedAID, appendix B.2, after MGCA, NeurIPS 2022).

    >>> masks = torch.tensor([[[1.0, 0.0]]])
    >>> [round(float(focal_dice(logit * (2 * masks - 1), masks)), 2) for logit in (9.0, 0.0, -9.0)]
    [0.0, 2.14, 91.08]
    """
    return focal_weight * focal(logits, masks, gamma) - dice_weight * soft_dice(logits, masks, smooth).log()


@in_full_precision
def cross_entropy_dice(
    logits: Float[Tensor, "b c h w"],
    masks: Integer[Tensor, "b h w"],
    *,
    dice_weight: float = 1.0,
    over: Literal["batch", "picture"] = "batch",
    background: bool = False,
    smooth: float = 1.0,
) -> Float[Tensor, ""]:
    """CE + dice_weight (1 - mean soft Dice), as in nnU-Net (Isensee et al., Nature Methods 2021).

    Args:
        logits: Logits of the classes; the first is the background.
        masks: Class of each pixel; any other value leaves the pixel out. The cross-entropy is a mean over an image's
            pixels, then over images.
        dice_weight: Factor of the Dice loss: soft Dice of each class, then the mean.
        over: Extent of a soft Dice; of single images the loss is a mean over samples.
        background: True counts the first class in the mean of Dice.
        smooth: Constant s of ``soft_dice``.

    >>> masks = torch.tensor([[[1, 0]]])
    >>> logits = torch.nn.functional.one_hot(masks, 2).movedim(-1, 1).float()
    >>> [round(float(cross_entropy_dice(scale * logits, masks)), 2) for scale in (9.0, 0.0, -9.0)]
    [0.0, 1.03, 9.67]
    """
    # compared, not scattered: per-sample gradients are taken through this
    classes = torch.arange(logits.shape[1], device=logits.device)[:, None, None]
    truth = (masks[:, None] == classes).to(logits.dtype)
    counted = truth.sum(1, keepdim=True)
    by_image = -(logits.log_softmax(1) * truth).sum((1, 2, 3)) / counted.sum((1, 2, 3)).clamp(min=1)
    shares = _shares(logits.softmax(1) * counted, truth, (0, 2, 3) if over == "batch" else (2, 3), smooth)
    kept = shares if background else shares[..., 1:]
    return by_image.mean() + dice_weight * (1 - kept.mean())


def _shares(chances: Tensor, truth: Tensor, over: tuple[int, ...], smooth: float) -> Tensor:
    return (2 * (chances * truth).sum(over) + smooth) / (chances.sum(over) + truth.sum(over) + smooth)
