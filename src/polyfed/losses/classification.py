"""Losses of classes: with a margin, between class weights, and on distances to class prototypes."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.losses.precision import in_full_precision


@in_full_precision
def margin_cross_entropy(
    logits: Float[Tensor, "b classes"], labels: Int[Tensor, " b"], margin: float = 4.0
) -> Float[Tensor, ""]:
    """Mean of CE(z - margin onehot(y), y): the true class must win by ``margin`` (CreamFL: 4)."""
    if margin == 0:
        return F.cross_entropy(logits, labels)
    # not in place: the logits belong to the caller, and autograd needs them
    reduction = logits.new_full((len(labels), 1), -margin)
    return F.cross_entropy(logits.scatter_add(1, labels[:, None], reduction), labels)


@in_full_precision
def class_separation(weight: Float[Tensor, "classes d"]) -> Float[Tensor, ""]:
    """CE(relu(W) relu(W)^T, class ids): low if their positive parts are near orthogonal (CreamFL)."""
    positive = weight.relu()
    return F.cross_entropy(positive @ positive.T, torch.arange(len(weight), device=weight.device))


@in_full_precision
def prototype_distance(
    features: Float[Tensor, "b d"],
    prototypes: Float[Tensor, "classes d"],
    present: Bool[Tensor, " classes"],
    labels: Int[Tensor, " b"],
    distance: Distillation = "l2",
) -> Float[Tensor, ""]:
    """Distance of each sample's feature to the global prototype of its class, mean over those that have one.

    FedProto's L_R (Tan et al., AAAI 2022, Eq. 8) is d(mean feature of a class, its prototype). As d is convex, the mean
    distance of the class's samples, which a mini-batch estimates and the released code uses, is an upper bound of it.

    Args:
        features: of the samples; gradient to these only.
        prototypes: one row a class, whatever in those that are absent.
        present: classes that have a prototype.
        labels: classes of the samples.
        distance: ``l2``, the norm (paper); ``mse``, its square, mean over dimensions (released); ``cosine``.

    Returns:
        0 if no sample's class has a prototype.
    """
    # absent rows may hold anything: they are masked before any arithmetic
    return DISTILLATIONS[distance](features, prototypes[labels], present[labels])


@in_full_precision
def distances(features: Float[Tensor, "b d"], prototypes: Float[Tensor, "c d"]) -> Float[Tensor, "b c"]:
    """L2 distance of every feature to every prototype; the gradient of a distance of 0 is 0."""
    # by differences, not by products: these would lose small distances of long vectors
    return torch.cdist(features, prototypes, compute_mode="donot_use_mm_for_euclid_dist")


@in_full_precision
def distance_contrast(
    features: Float[Tensor, "n d"],
    prototypes: Float[Tensor, "c d"],
    labels: Int[Tensor, " n"],
    margin: float = 0.0,
) -> Float[Tensor, ""]:
    """Cross-entropy over negative distances, mean over n; FedTGP's contrast of global prototypes with clients'.

    -log exp(-(D_y + margin)) / (exp(-(D_y + margin)) + sum_{c != y} exp(-D_c)), where D_c = ||feature - prototype_c||.

    Args:
        features: the clients' prototypes.
        prototypes: the global ones, in training.
        labels: row of the global prototype of each feature's class.
        margin: added to the distance of the true class.
    """
    return margin_cross_entropy(-distances(features, prototypes), labels, margin)


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
        tau: temperature.

    Returns:
        0 if no sample's class has a prototype.
    """
    known = present[labels]
    cosines = F.normalize(features, dim=1) @ F.normalize(prototypes.detach(), dim=1).T
    logits = (cosines / tau).masked_fill(~present, -math.inf)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses.where(known, 0).sum() / known.sum().clamp(min=1)
