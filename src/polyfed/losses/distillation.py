"""Distances by which a student learns representations or class scores, CreamFL's L2 norm (Eq. 7) among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision

Distillation = Literal["l2", "mse", "l1", "cosine", "kl"]


@in_full_precision
def l2(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of the unsquared norm |student - target|_2 (CreamFL Eq. 7); its gradient at 0 is 0.

    Args:
        student: outputs that learn.
        target: constants.
        valid: samples that have a target; the mean is over these, and 0 if there are none.
    """
    return _mean(torch.linalg.vector_norm(student - _constant(target, student, valid), dim=1), valid)


@in_full_precision
def mse(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Squared error, mean over samples and dimensions (CreamFL's released code); arguments as ``l2``."""
    return _mean((student - _constant(target, student, valid)).square().mean(1), valid)


@in_full_precision
def l1(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Absolute error, mean over samples and dimensions (FedMD's digest, Li and Wang 2019); arguments as ``l2``."""
    return _mean((student - _constant(target, student, valid)).abs().mean(1), valid)


@in_full_precision
def kl(
    student: Float[Tensor, "b c"], target: Float[Tensor, "b c"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of KL(softmax(target) || softmax(student)), of class scores; arguments as ``l2``."""
    told = F.log_softmax(_constant(target, student, valid), dim=1)
    return _mean(F.kl_div(F.log_softmax(student, dim=1), told, reduction="none", log_target=True).sum(1), valid)


@in_full_precision
def cosine(
    student: Float[Tensor, "b d"], target: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None = None
) -> Float[Tensor, ""]:
    """Mean over samples of 1 - cos(student, target), blind to the norms; arguments as ``l2``."""
    return _mean(1 - F.cosine_similarity(student, _constant(target, student, valid), dim=1), valid)


DISTILLATIONS: Mapping[Distillation, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = MappingProxyType(
    {"l2": l2, "mse": mse, "l1": l1, "cosine": cosine, "kl": kl}
)
"""The distances by name."""


def _constant(
    target: Float[Tensor, "b d"], student: Float[Tensor, "b d"], valid: Bool[Tensor, " b"] | None
) -> Float[Tensor, "b d"]:
    """The target without gradient; where there is none, the student itself: its gradient is 0 then."""
    return target.detach() if valid is None else torch.where(valid[:, None], target, student).detach()


def _mean(values: Float[Tensor, " b"], valid: Bool[Tensor, " b"] | None) -> Float[Tensor, ""]:
    if valid is None:
        return values.mean()
    return values.masked_fill(~valid, 0).sum() / valid.sum().clamp_min(1)
