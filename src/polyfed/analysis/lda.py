"""Linear discriminant analysis: the directions along which classes differ most for their own width (Fisher 1936)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.errors import DataError

SHRINKAGE = 0.1


@dataclass(frozen=True)
class LDA:
    """A projection to few dimensions.

    Attributes:
        mean: of all points [d].
        axes: directions as columns [d, k]; each has unit variance within classes.
        ratios: variance between classes over (shrunk) variance within, along each axis [k].
    """

    mean: Float[Tensor, " d"]
    axes: Float[Tensor, "d k"]
    ratios: Float[Tensor, " k"]

    def project(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n k"]:
        """Coordinates of points, in float64."""
        return (x.double() - self.mean) @ self.axes


def lda(x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"], *, dims: int = 2, shrinkage: float = SHRINKAGE) -> LDA:
    """Solve S_b w = lambda S_w w for the largest lambda, in float64.

    S_b is the covariance of the class means, weighted by class size, and S_w the covariance around them, shrunk to
    (1 - s) S_w + s tr(S_w)/d I, which has full rank although there may be fewer points than dimensions.
    c classes span c - 1 axes; further axes are those of greatest variance within the classes, orthogonal (in S_w) to
    the first. The entry of largest magnitude of each axis is positive.

    Args:
        x: points.
        labels: class of each point, any integers.
        dims: number of axes.
        shrinkage: s, in (0, 1].

    Raises:
        DataError: fewer than two classes, fewer dimensions than ``dims``, or values that are not finite.
    """
    codes = torch.unique(labels, return_inverse=True)[1]
    classes = int(codes.max()) + 1 if len(codes) else 0
    if classes < 2 or x.shape[1] < dims or not bool(x.isfinite().all()):
        raise DataError(
            f"no discriminant axes of {len(x)} points in {classes} classes and {x.shape[1]} dimensions; "
            f"it needs at least 2 classes, {dims} dimensions and finite values"
        )
    x = x.double()
    mean, within, between = _scatter(x, codes, classes)
    whitening = _whitening(within, shrinkage)
    _, vectors = torch.linalg.eigh(whitening.T @ between @ whitening)
    real = min(dims, classes - 1)
    inner = vectors.flip(1)[:, :real]
    inner = torch.cat([inner, _widest(whitening, inner, dims - real)], dim=1)
    ratios = torch.linalg.vecdot(inner, whitening.T @ between @ whitening @ inner, dim=0)
    axes = whitening @ inner
    peak = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return LDA(mean, axes * peak.sign(), ratios)


def class_means(
    x: Float[Tensor, "n d"], codes: Int64[Tensor, " n"], classes: int
) -> tuple[Float[Tensor, "c d"], Int64[Tensor, " c"]]:
    """Mean and number of the points of each class 0 ... c - 1, in float64."""
    counts = torch.bincount(codes, minlength=classes)
    sums = torch.zeros(classes, x.shape[1], dtype=torch.float64).index_add_(0, codes, x.double())
    return sums / counts[:, None], counts


def _scatter(
    x: Float[Tensor, "n d"], codes: Int64[Tensor, " n"], classes: int
) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"], Float[Tensor, "d d"]]:
    """Mean, covariance within and covariance between classes."""
    means, counts = class_means(x, codes, classes)
    mean, inner = x.mean(0), x - means[codes]
    outer = (means - mean) * (counts / len(x)).sqrt()[:, None]
    return mean, inner.T @ inner / len(x), outer.T @ outer


def _whitening(within: Float[Tensor, "d d"], shrinkage: float) -> Float[Tensor, "d d"]:
    """W with W^T S W = I for the shrunk S; columns by descending variance. Points without width count as round."""
    spread = float(within.diagonal().mean())
    identity = torch.eye(len(within), dtype=within.dtype)
    shrunk = (1 - shrinkage) * within + shrinkage * spread * identity if spread > 0 else identity
    values, vectors = torch.linalg.eigh(shrunk)
    scaled: Tensor = vectors / values.clamp(min=1e-12 * float(values[-1])).sqrt()
    return scaled.flip(1)


def _widest(whitening: Float[Tensor, "d d"], taken: Float[Tensor, "d r"], count: int) -> Float[Tensor, "d count"]:
    """In whitened coordinates: the first axes (of greatest variance) made orthogonal to those that are taken."""
    identity = torch.eye(len(whitening), dtype=whitening.dtype)
    candidates = torch.cat([taken, identity[:, : count + taken.shape[1]]], dim=1)
    columns: list[Tensor] = []
    for candidate in candidates.T:
        rest = candidate - sum((column * (column @ candidate) for column in columns), torch.zeros_like(candidate))
        if float(rest.norm()) > 1e-6:
            columns.append(rest / rest.norm())
    start = taken.shape[1]
    return torch.stack(columns, dim=1)[:, start : start + count]
