"""Losses of classes: with a margin, and between class weights."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision


@in_full_precision
def margin_cross_entropy(
    logits: Float[Tensor, "b classes"], labels: Int[Tensor, " b"], margin: float = 4.0
) -> Float[Tensor, ""]:
    """Mean of CE(z - margin onehot(y), y): the true class must win by ``margin`` (CreamFL: 4; 0: plain cross-entropy).

    >>> logits, labels = torch.tensor([[4.0, 0.0]]), torch.tensor([0])
    >>> [round(float(margin_cross_entropy(logits, labels, margin)), 3) for margin in (0.0, 4.0)]
    [0.018, 0.693]
    """
    if margin == 0:
        return F.cross_entropy(logits, labels)
    # not in place: the logits belong to the caller, and autograd needs them
    reduction = logits.new_full((len(labels), 1), -margin)
    return F.cross_entropy(logits.scatter_add(1, labels[:, None], reduction), labels)


@in_full_precision
def class_separation(weight: Float[Tensor, "classes d"]) -> Float[Tensor, ""]:
    """CE(relu(W) relu(W)^T, class ids): low if their positive parts are near orthogonal (CreamFL).

    >>> orthogonal, alike = 4 * torch.eye(2), torch.ones(2, 2)
    >>> [round(float(class_separation(weight)), 3) for weight in (orthogonal, alike)]
    [0.0, 0.693]
    """
    positive = weight.relu()
    return F.cross_entropy(positive @ positive.T, torch.arange(len(weight), device=weight.device))
