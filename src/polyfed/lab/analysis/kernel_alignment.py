"""Centred kernel alignment: how alike two sets of representations of the same samples are, up to rotation and scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.core.errors import DataError

LEAST_SAMPLES = 4
"""Samples that the debiased estimate needs."""

_ROWS = 64  # rows of the kernel matrices that are in memory at a time
_NOTHING = 1e-6  # spread, as a share of the size of the vectors, below which they count as one vector


def linear_cka(representations: Sequence[Float[Tensor, "n _"]]) -> Float[Tensor, "p p"]:
    """Debiased linear CKA of every two of p sets of vectors of the same n samples, in float64.

    CKA(X, Y) = HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) (Kornblith et al., ICML 2019, Eq. 2) with linear kernels and
    the unbiased HSIC (Song et al., JMLR 2012, Eq. 5): for kernel matrices without their diagonals and centred so that
    all rows and columns sum to 0, it is their inner product over n (n - 3). The usual, biased estimate rises with
    d / n even for unrelated vectors; this one is 0 in expectation for these, and may be slightly negative.

    1 for vectors that differ by rotation, shift and one scale; widths may differ. NaN for vectors that are all equal.
    Memory is that of the vectors, not of n x n matrices.

    Raises:
        DataError: fewer than 4 samples, sets of different sizes, or values that are not finite.
    """
    sizes = sorted({len(x) for x in representations})
    if len(sizes) != 1 or sizes[0] < LEAST_SAMPLES or not all(map(_is_finite, representations)):
        raise DataError(
            f"no kernel alignment of sets of {', '.join(map(str, sizes)) or 'no'} vectors: "
            f"it needs one finite vector for each of at least {LEAST_SAMPLES} samples in all sets"
        )
    n, centred = sizes[0], [_centred(x.double().cpu()) for x in representations]
    offsets = torch.stack([_offsets(x) for x in centred])
    products = torch.zeros(len(centred), len(centred), dtype=torch.float64)
    for rows in torch.split(torch.arange(n), _ROWS):
        kernels = torch.stack([x[rows] @ x.T for x in centred]) - offsets[:, rows, None] - offsets[:, None, :]
        kernels[:, torch.arange(len(rows)), rows] = 0
        flat = kernels.flatten(1)
        products += flat @ flat.T
    # unbiased estimates of unrelated sets may be below 0
    norms = products.diagonal().clamp(min=0).sqrt()
    return (products / (norms[:, None] * norms)).clamp(-1, 1)


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _centred(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    # scaled too, as squares of large values would lose the differences; what is left of equal vectors is rounding
    centred: Tensor = x - x.mean(0)
    spread, size = (float(value.abs().max()) if value.numel() else 0.0 for value in (centred, x))
    return torch.zeros_like(centred) if spread <= _NOTHING * size else centred / spread


def _offsets(x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """o with o_i + o_j to be taken from entry (i, j) of x x^T so that rows sum to 0, the diagonal left out."""
    n = len(x)
    sums = x @ x.sum(0) - x.square().sum(1)  # of rows, without the diagonal
    return sums / (n - 2) - sums.sum() / (2 * (n - 1) * (n - 2))
