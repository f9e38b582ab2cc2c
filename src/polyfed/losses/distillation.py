"""Distances by which a student learns representations, and divergences between softmaxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.log_sum_exp import log_partition
from polyfed.losses.precision import in_full_precision

Distillation = Literal["l2", "mse", "l1", "cosine"]
GuidanceReduction = Literal["sum", "mean", "element"]


@in_full_precision
def l2(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of the unsquared norm |student - target|_2 (CreamFL Eq. 7); its gradient at 0 is 0.

    Args:
        student: Outputs that learn.
        target: Constant outputs.
        valid: Samples that have a target; the mean is over these, and 0 if there are none.

    >>> float(l2(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)))
    5.0
    """
    return _mean(torch.linalg.vector_norm(student - _constant(target, student, valid), dim=1), valid)


@in_full_precision
def mse(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Squared error, mean over samples and dimensions (CreamFL's released code); arguments as ``l2``.

    >>> float(mse(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)))
    12.5
    """
    return _mean((student - _constant(target, student, valid)).square().mean(1), valid)


@in_full_precision
def l1(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Absolute error, mean over samples and dimensions (FedMD's digest, Li and Wang 2019); arguments as ``l2``.

    >>> float(l1(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)))
    3.5
    """
    return _mean((student - _constant(target, student, valid)).abs().mean(1), valid)


@in_full_precision
def cosine(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of 1 - cos(student, target), blind to the norms; arguments as ``l2``.

    >>> float(cosine(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])))
    1.0
    """
    return _mean(1 - F.cosine_similarity(student, _constant(target, student, valid), dim=1), valid)


DISTILLATIONS: Mapping[Distillation, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = MappingProxyType(
    {"l2": l2, "mse": mse, "l1": l1, "cosine": cosine}
)
"""The distances by name."""


@in_full_precision
def squared_distance(
    z: Float[Tensor, "b d"], anchors: Float[Tensor, "b d"], reduction: GuidanceReduction = "sum"
) -> Float[Tensor, ""]:
    """Sum over the batch of ||z - z*||^2 (FedAID, arXiv 2404.03854, Eq. 1 and 5); gradient to both.

    Args:
        z: Representations.
        anchors: Representations z*, in the same order.
        reduction: ``sum`` over samples, their ``mean``, or the mean over all b x d elements (FedDRA's released code).

    >>> [float(squared_distance(torch.ones(2, 4), torch.zeros(2, 4), how)) for how in ("sum", "mean", "element")]
    [8.0, 4.0, 1.0]
    """
    squares = (z - anchors).square()
    if reduction == "element":
        return squares.mean()
    # in the order of the paper: over dimensions, then over samples
    distances = squares.sum(1)
    return distances.sum() if reduction == "sum" else distances.mean()


@in_full_precision
def score_kl(student: Float[Tensor, "b c"], teacher: Float[Tensor, "b c"], tau: float = 1.0) -> Float[Tensor, " b"]:
    """KL(softmax(teacher / tau) || softmax(student / tau)) of each row of class scores; gradient to ``student`` only.

    A higher temperature ``tau`` softens both. It is not multiplied by tau squared.

    >>> student, teacher = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    >>> [round(float(score_kl(student, teacher, tau)), 3) for tau in (1.0, 4.0)]
    [1.523, 0.122]
    """
    teacher = F.log_softmax(teacher.detach() / tau, dim=1)
    return F.kl_div(F.log_softmax(student / tau, dim=1), teacher, reduction="none", log_target=True).sum(1)


@in_full_precision
def similarity_kl(
    student: Float[Tensor, "b d"],
    teacher: Float[Tensor, "b d"],
    anchors: Float[Tensor, "P d"],
    tau: float = 1.0,
    *,
    chunk: int = 4096,
) -> Float[Tensor, " b"]:
    """``score_kl`` of the similarities u G^T to the anchors G, in memory b x ``chunk``.

    With A(u) = log sum_j exp(u . g_j / tau) it is A(student) - A(teacher) - A'(teacher) . (student - teacher), the
    Bregman divergence of A, so that no row of P similarities is held.

    Args:
        student: Representations that learn.
        teacher: Constant representations.
        anchors: Constant representations with which both are compared.
        tau: Temperature; a higher one softens both sides.
        chunk: Anchors at a time; more need more memory and less time.

    >>> student, teacher, anchors = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 2 * torch.eye(2)
    >>> round(float(similarity_kl(student, teacher, anchors)), 3)
    1.523
    """
    anchors, own = anchors.detach(), torch.zeros(len(student), dtype=torch.int64, device=student.device)
    with torch.enable_grad():  # A'(teacher) comes from autograd, even where the caller evaluates without gradients
        teacher = teacher.detach().to(student).requires_grad_()
        level = log_partition(teacher, anchors, own, tau, None, True, chunk)
        (slope,) = torch.autograd.grad(level.sum(), teacher)
    # the row's own anchor is part of both sums, so that any index does
    ahead = log_partition(student, anchors, own, tau, None, True, chunk)
    return ahead - level.detach() - (slope * (student - teacher.detach())).sum(1)


def _constant(
    target: Float[Tensor, "b d"], student: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None
) -> Float[Tensor, "b d"]:
    """The target without gradient; rows without one are the student's own, and have gradient 0."""
    return target.detach() if valid is None else torch.where(valid[:, None], target, student).detach()


def _mean(values: Float[Tensor, " b"], valid: Bool[Tensor, " b"] | None) -> Float[Tensor, ""]:
    if valid is None:
        return values.mean()
    return values.masked_fill(~valid, 0).sum() / valid.sum().clamp_min(1)


@in_full_precision
def relational_kl(
    source: Float[Tensor, "b d"],
    target: Float[Tensor, "b d"],
    cosines: Float[Tensor, "b b"],
    known: Bool[Tensor, "b b"],
    tau: float,
) -> Float[Tensor, ""]:
    """Mean over rows s of KL(softmax_t(C_st / tau) || softmax_t(cos(source_s, target_t) / tau)), C a teacher's.

    Similarity-preserving and relational distillation (Tung and Mori 2019; Park et al. 2019), with distributions in
    place of matrices as in Fang et al. (SEED, 2021). Invariant to rotations of either's space.

    Args:
        source: The student's rows; they carry gradient, as does ``target``.
        target: Rows with which they are compared; ``source`` itself within a modality.
        cosines: Constants C; anything finite where they are unknown.
        known: Pairs that take part; each softmax is over the pairs of its row. Rows with fewer than two do not count;
            the loss is 0 if none counts.
        tau: Temperature; a higher one includes more distant samples.

    >>> x, known = torch.eye(3), torch.ones(3, 3, dtype=torch.bool)
    >>> [round(float(relational_kl(x, x, cosines, known, tau=0.5)), 3) for cosines in (torch.eye(3), torch.ones(3, 3))]
    [0.0, 0.474]
    """
    own = F.normalize(source, dim=1) @ F.normalize(target, dim=1).T
    lowest = torch.finfo(own.dtype).min / 2  # finite: a softmax over nothing but -inf is NaN
    student, teacher = (torch.where(known, side / tau, lowest) for side in (own, cosines.to(own)))
    counts = known.sum(1) > 1  # a single one has no distribution to learn
    return (score_kl(student, teacher) * counts).sum() / counts.sum().clamp_min(1)
