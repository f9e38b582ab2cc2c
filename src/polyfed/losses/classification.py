"""Losses of CreamFL's uni-modal clients: cross-entropy with a margin, and separation of the class weights."""

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
    """Mean of CE(z - margin onehot(y), y): the true class must win by ``margin`` (0: plain cross-entropy)."""
    if margin == 0:
        return F.cross_entropy(logits, labels)
    reduction = logits.new_full((len(labels), 1), -margin)
    return F.cross_entropy(logits.scatter_add(1, labels[:, None], reduction), labels)


@in_full_precision
def class_separation(weight: Float[Tensor, "classes d"]) -> Float[Tensor, ""]:
    """CE(relu(W) relu(W)^T, class ids): low if their positive parts are near orthogonal."""
    positive = weight.relu()
    return F.cross_entropy(positive @ positive.T, torch.arange(len(weight), device=weight.device))
