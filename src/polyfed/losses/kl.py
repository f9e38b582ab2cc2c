"""Kullback-Leibler divergence between the outputs of two participants, given as logits or as representations."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.log_partition import log_partition
from polyfed.losses.precision import in_full_precision


@in_full_precision
def score_kl(student: Float[Tensor, "b c"], teacher: Float[Tensor, "b c"], tau: float = 1.0) -> Float[Tensor, " b"]:
    """KL(softmax(teacher / tau) || softmax(student / tau)) of each row of class scores; gradient to ``student`` only.

    It is not multiplied by tau squared.
    """
    told = F.log_softmax(teacher.detach() / tau, dim=1)
    return F.kl_div(F.log_softmax(student / tau, dim=1), told, reduction="none", log_target=True).sum(1)


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
        tau: temperature.
        chunk: anchors at a time.
    """
    anchors, own = anchors.detach(), torch.zeros(len(student), dtype=torch.int64, device=student.device)
    with torch.enable_grad():
        told = teacher.detach().to(student).requires_grad_()
        level = log_partition(told, anchors, own, tau, None, True, chunk)
        (slope,) = torch.autograd.grad(level.sum(), told)
    ahead = log_partition(student, anchors, own, tau, None, True, chunk)
    return ahead - level.detach() - (slope * (student - told.detach())).sum(1)


def row_kl(student: Tensor, teacher: Tensor, anchors: Tensor | None, tau: float) -> Float[Tensor, " b"]:
    """``similarity_kl`` where there are anchors, else ``score_kl``."""
    return score_kl(student, teacher, tau) if anchors is None else similarity_kl(student, teacher, anchors, tau)
