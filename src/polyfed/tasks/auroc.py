"""Area under the ROC curve, by ranks: the chance that a positive scores above a negative, a tie counting half."""

from __future__ import annotations

from math import nan
from statistics import fmean

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def auroc(scores: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Percent of the pairs (positive, negative) in which the positive scores higher; equal scores count half.

    Mann and Whitney's U over the number of pairs. NaN if there are no positives, no negatives, or a score is NaN.
    """
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives or bool(scores.isnan().any()):
        return nan
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    middle = counts.double().cumsum(0) - (counts.double() - 1) / 2  # mean rank, from 1, of equal scores
    above = middle[place[positive]].sum() - positives * (positives + 1) / 2
    return 100.0 * float(above) / (positives * negatives)


def class_aurocs(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> list[float]:
    """AUROC of each class against the rest; NaN for a class that does not occur, or that all samples have."""
    return [auroc(scores[:, label], labels == label) for label in range(scores.shape[1])]


def macro_auroc(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> float:
    """For two classes the AUROC of class 1 by the difference of the scores; for more, the mean over classes.

    Classes that do not occur are left out of the mean; NaN if none is left.
    """
    if scores.shape[1] == 2:
        # the softmax of two classes rises with the difference alone
        return auroc(scores[:, 1] - scores[:, 0], labels == 1)
    defined = [value for value in class_aurocs(scores, labels) if value == value]
    return fmean(defined) if defined else nan
