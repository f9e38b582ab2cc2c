"""How well a set of vectors keeps classes apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.analysis.lda import class_means


@dataclass(frozen=True)
class Separation:
    """Measures of n labelled vectors; NaN where they are not defined.

    Attributes:
        silhouette: -1 to 1, higher is better.
        ratio: variance between classes over variance within.
        nearest_mean: percent of the vectors that lie nearest to the mean of their own class.
    """

    silhouette: float
    ratio: float
    nearest_mean: float

    @classmethod
    def of(cls, x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> Separation:
        """All measures."""
        return cls(silhouette(x, labels), variance_ratio(x, labels), nearest_mean_accuracy(x, labels))


def silhouette(x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> float:
    """Mean of (b - a) / max(a, b) (Rousseeuw 1987), in float64.

    a is a vector's mean distance to the others of its class, b the least mean distance to another class; 0 for a
    vector that is alone in its class. NaN for fewer than two classes.
    """
    x, codes, counts = _coded(x, labels)
    if len(counts) < 2:
        return math.nan
    sums = torch.zeros(len(x), len(counts), dtype=x.dtype).index_add_(1, codes, torch.cdist(x, x))
    own = codes[:, None]
    inner = sums.gather(1, own)[:, 0] / (counts[codes] - 1).clamp(min=1)
    outer = (sums / counts).scatter(1, own, math.inf).amin(1)
    values = (outer - inner) / torch.maximum(outer, inner).clamp(min=1e-300)
    return float(values.masked_fill(counts[codes] == 1, 0).mean())


def variance_ratio(x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> float:
    """tr S_b / tr S_w: squared distances of class means from the mean by those of vectors from their class means.

    Both are sums over the vectors, in float64. NaN for fewer than two classes; infinite for classes without width.
    """
    x, codes, counts = _coded(x, labels)
    if len(counts) < 2:
        return math.nan
    means, _ = class_means(x, codes, len(counts))
    between = (means - x.mean(0)).square().sum(1) @ counts.to(x)
    return float(between / (x - means[codes]).square().sum())


def nearest_mean_accuracy(x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> float:
    """Percent of the vectors that are nearer to the mean of their class than to that of any other, in float64.

    The mean of a vector's own class is that of the others in it. Vectors alone in their class do not count; ties
    count as wrong. NaN for fewer than two classes, or if no vector counts.
    """
    x, codes, counts = _coded(x, labels)
    many = counts[codes] > 1
    if len(counts) < 2 or not bool(many.any()):
        return math.nan
    means, _ = class_means(x, codes, len(counts))
    # direct differences: the squared expansion would blur ties
    distances = torch.stack([torch.linalg.vector_norm(x - mean, dim=1) for mean in means], dim=1)
    size = counts[codes].to(x)[many]
    own = codes[many, None]
    inner = distances[many].gather(1, own)[:, 0] * size / (size - 1)  # x - mean of the others = n / (n - 1) (x - mean)
    outer = distances[many].scatter(1, own, math.inf).amin(1)
    return 100 * float((inner < outer).double().mean())


def _coded(
    x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]
) -> tuple[Float[Tensor, "n d"], Int64[Tensor, " n"], Int64[Tensor, " c"]]:
    """Vectors in float64 on the CPU, classes numbered from 0, and how many vectors each has."""
    _, codes, counts = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    return x.double().cpu(), codes, counts
