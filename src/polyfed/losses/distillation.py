"""Distances by which a student learns representations or class scores, and divergences between softmaxes."""

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

Distillation = Literal["l2", "mse", "l1", "cosine", "kl"]
GuidanceReduction = Literal["sum", "mean", "element"]


@in_full_precision
def l2(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of the unsquared norm |student - target|_2 (CreamFL Eq. 7); its gradient at 0 is 0.

    Args:
        student: outputs that learn.
        target: constants.
        valid: samples that have a target; the mean is over these, and 0 if there are none.

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
def kl(
    student: Float[Tensor, "b c"], target: Float[Tensor, "b c"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of KL(softmax(target) || softmax(student)), of class scores; arguments as ``l2``.

    >>> round(float(kl(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]]))), 3)
    1.523
    """
    return _mean(score_kl(student, _constant(target, student, valid)), valid)


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
    {"l2": l2, "mse": mse, "l1": l1, "cosine": cosine, "kl": kl}
)
"""The distances by name."""


@in_full_precision
def squared_distance(
    z: Float[Tensor, "b d"], anchors: Float[Tensor, "b d"], reduction: GuidanceReduction = "sum"
) -> Float[Tensor, ""]:
    """Sum over the batch of ||z - z*||^2 (FedAID, arXiv 2404.03854, Eq. 1 and 5); gradient to both.

    Args:
        z: representations.
        anchors: z*, in the same order.
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
        student: representations that learn.
        teacher: constants.
        anchors: what both are compared with; constants.
        tau: temperature; a higher one softens both sides.
        chunk: anchors at a time; more need more memory and less time.

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


def row_kl(student: Tensor, teacher: Tensor, anchors: Tensor | None, tau: float) -> Float[Tensor, " b"]:
    """``similarity_kl`` where there are anchors, else ``score_kl``.

    >>> scores = torch.tensor([[2.0, 0.0]])
    >>> round(float(row_kl(scores, -scores, anchors=None, tau=1.0)), 3)
    1.523
    """
    return score_kl(student, teacher, tau) if anchors is None else similarity_kl(student, teacher, anchors, tau)


def _constant(
    target: Float[Tensor, "b d"], student: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None
) -> Float[Tensor, "b d"]:
    """The target without gradient; where there is none, the student itself: its gradient is 0 then."""
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

    The idea is that of similarity-preserving and relational distillation (Tung and Mori 2019; Park et al. 2019), with
    distributions in place of matrices, as Fang et al. (SEED, 2021) have them. It is blind to rotations of the student's
    space and of the teacher's.

    Args:
        source: the student's rows, with gradient, as ``target``.
        target: what they are compared with; ``source`` itself within a modality.
        cosines: C, constants; anything finite where they are not known.
        known: pairs that take part, each softmax is over those of its row. Rows with fewer than two do not count; the
            loss is 0 if none counts.
        tau: temperature; a higher one looks at far samples too.

    >>> x, known = torch.eye(3), torch.ones(3, 3, dtype=torch.bool)
    >>> [round(float(relational_kl(x, x, cosines, known, tau=0.5)), 3) for cosines in (torch.eye(3), torch.ones(3, 3))]
    [0.0, 0.474]
    """
    own = F.normalize(source, dim=1) @ F.normalize(target, dim=1).T
    lowest = torch.finfo(own.dtype).min / 2  # finite: a softmax over nothing but -inf is NaN
    student, teacher = (torch.where(known, side / tau, lowest) for side in (own, cosines.to(own)))
    counts = known.sum(1) > 1  # of a single one there is no distribution to learn
    return (score_kl(student, teacher) * counts).sum() / counts.sum().clamp_min(1)
