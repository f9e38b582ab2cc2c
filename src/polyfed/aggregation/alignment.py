"""Maps of one participant's representations into the space of another's, fitted on the samples that both represent.

Networks that were trained apart agree on what is alike, not on axes: unit vectors of unaligned spaces average to almost
nothing. Rows that are zero on either side, as of samples that somebody did not represent, do not take part in a fit.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.statistics import working_dtype
from polyfed.core.settings import Settings

_RIDGE_PENALTY = 0.01


@torch.no_grad()
def procrustes(values: Float[Tensor, "n d"], reference: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """values R with the rotation or reflection R that minimises ||values R - reference||_F (Schoenemann 1966).

    R = U V^T of the singular value decomposition of values^T reference. Norms of rows and angles between them stay.
    With fewer samples than dimensions R is not unique, but it is the same at every call.

    Returns:
        In fp32, or in fp64 if a side is.
    """
    values, reference = _working(values, reference)
    # a row that is zero on either side adds nothing to the product
    left, _, right = torch.linalg.svd(values.T @ reference)
    rotated: Tensor = values @ (left @ right)
    return rotated


@torch.no_grad()
def ridge(values: Float[Tensor, "n d"], reference: Float[Tensor, "n d"], penalty: float) -> Float[Tensor, "n d"]:
    """values W at unit length, W = argmin sum_k ||v_k W - r_k||^2 + penalty n ||W||_F^2; zero rows stay zero.

    n counts the samples that take part. With n close to d and without a penalty the map would return the reference
    itself, whatever the values are. The larger the penalty, the closer W gets to a multiple of values^T reference, in
    which directions weigh by how strongly both sides use them.

    Args:
        values: unit rows, or zero ones.
        reference: likewise.
        penalty: greater than 0. The mean eigenvalue of values^T values / n is 1 / d for comparison.

    Returns:
        In fp32, or in fp64 if a side is.
    """
    values, reference = _working(values, reference)
    fitted = values * reference.any(1, keepdim=True)
    present = fitted.any(1).sum().clamp_min(1).to(fitted)  # of the same precision, and never on the host
    gram = fitted.T @ fitted
    gram.diagonal().add_(penalty * present)
    return F.normalize(values @ torch.linalg.solve(gram, fitted.T @ reference), dim=1)


class Alignment(Settings):
    """A map of each client's representations to the server's, before they are averaged."""

    kind: Literal["procrustes", "ridge"] = Field(description="rotation or reflection, or ridge regression")
    penalty: float | None = Field(
        default=None, ge=1e-6, description="ridge: penalty of the map; smaller ones drown in rounding; None: 0.01"
    )

    @model_validator(mode="after")
    def _penalty_of_ridge(self) -> Self:
        if self.penalty is not None and self.kind != "ridge":
            raise ValueError(f"penalty {self.penalty} is of ridge, but kind is {self.kind}; leave it out")
        return self

    def move(self, values: Float[Tensor, "n d"], reference: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """``values`` in the space of ``reference``."""
        if self.kind == "procrustes":
            return procrustes(values, reference)
        return ridge(values, reference, _RIDGE_PENALTY if self.penalty is None else self.penalty)


def _working(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    dtype = working_dtype(values, reference)
    return values.to(dtype), reference.to(values.device, dtype)
