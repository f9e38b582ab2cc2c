"""Losses of classes: with a margin, between class weights, and against class prototypes."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
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


@in_full_precision
def prototype_contrast(
    features: Float[Tensor, "b d"],
    prototypes: Float[Tensor, "c d"],
    present: Bool[Tensor, " c"],
    labels: Int[Tensor, " b"],
    tau: float = 0.5,
) -> Float[Tensor, ""]:
    """-log exp(cos(z, p_y) / tau) / sum_c exp(cos(z, p_c) / tau), mean over samples whose class has a prototype.

    Args:
        features: of the samples; gradient to these only.
        prototypes: one row a class, whatever in those that are absent.
        present: classes that have a prototype, one at least.
        labels: classes of the samples.
        tau: temperature; a higher one softens the choice between prototypes.

    Returns:
        0 if no sample's class has a prototype.

    >>> prototypes, present = torch.eye(2), torch.tensor([True, True])
    >>> labels = torch.arange(2)
    >>> [round(float(prototype_contrast(prototypes, prototypes, present, labels, tau)), 3) for tau in (0.1, 0.5)]
    [0.0, 0.127]
    """
    known = present[labels]
    cosines = F.normalize(features, dim=1) @ F.normalize(prototypes.detach(), dim=1).T
    logits = (cosines / tau).masked_fill(~present, -math.inf)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.where(known, 0).sum() / known.sum().clamp(min=1)
