"""How well a set of vectors keeps classes apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.extras import brought_by
from polyfed.lab.analysis.projections import class_means


@dataclass(frozen=True)
class Separation:
    """Measures of n labelled vectors; NaN for fewer than two classes.

    Attributes:
        silhouette: -1 to 1, higher is better (Rousseeuw 1987); 0 for a vector that is alone in its class.
        ratio: variance between classes over variance within; infinite for classes without width.
        nearest_mean: percent of the vectors that lie nearer to the mean of the others of their class than to that of
            any other class. Ties count as wrong; vectors alone in their class do not count.
    """

    silhouette: float
    ratio: float
    nearest_mean: float

    @classmethod
    def of(cls, x: Float[Tensor, "n d"], labels: Int64[Tensor, " n"]) -> Separation:
        """All measures, in float64."""
        with brought_by("lab"):
            from sklearn.metrics import silhouette_score

        x, codes = x.double().cpu(), torch.unique(labels.cpu(), return_inverse=True)[1]
        means, counts = class_means(x, codes)
        if len(counts) < 2:
            return cls(math.nan, math.nan, math.nan)
        silhouette = float(silhouette_score(x.numpy(), codes.numpy())) if len(counts) < len(x) else 0.0
        between = (means - x.mean(0)).square().sum(1) @ counts.to(x)
        ratio = float(between / (x - means[codes]).square().sum())
        return cls(silhouette, ratio, _nearest_mean(x, codes, means, counts))


def _nearest_mean(
    x: Float[Tensor, "n d"], codes: Int64[Tensor, " n"], means: Float[Tensor, "c d"], counts: Int64[Tensor, " c"]
) -> float:
    counted = counts[codes] > 1
    if not bool(counted.any()):
        return math.nan
    x, own, size = x[counted], codes[counted, None], counts[codes].to(x)[counted]
    # direct differences: the squared expansion would blur ties
    distances = torch.stack([torch.linalg.vector_norm(x - mean, dim=1) for mean in means], dim=1)
    inner = distances.gather(1, own)[:, 0] * size / (size - 1)  # x - mean of the others = n / (n - 1) (x - mean)
    return 100 * float((inner < distances.scatter(1, own, math.inf).amin(1)).double().mean())
