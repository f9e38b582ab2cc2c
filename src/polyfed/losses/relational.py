"""Relational distillation: a student learns which samples of a batch are alike, not where they lie."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.distillation import score_kl
from polyfed.losses.precision import in_full_precision


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
        tau: temperature.
    """
    own = F.normalize(source, dim=1) @ F.normalize(target, dim=1).T
    lowest = torch.finfo(own.dtype).min / 2  # finite: a softmax over nothing but -inf is NaN
    student, teacher = (torch.where(known, side / tau, lowest) for side in (own, cosines.to(own)))
    counts = known.sum(1) > 1  # of a single one there is no distribution to learn
    return (score_kl(student, teacher) * counts).sum() / counts.sum().clamp_min(1)
