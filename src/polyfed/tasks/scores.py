"""Metrics with what each test item adds to them, and their 95 % intervals over items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.distributions import LEVEL, share_interval
from polyfed.data.samples import Samples

_DRAWS = 1000
_TRIES = 30  # of a draw that lacks all items of a class
_BLOCK = 1 << 20  # weights of items held at a time


class TaskScores(dict[str, float]):
    """Metrics of a task.

    Samples of one item (captions of a picture, questions on it) are no independent trials: intervals are over items.

    Args:
        metrics: name -> value.
        by_item: metric -> the means that it is the sum of, each as sums and counts by item.
    """

    def __init__(
        self, metrics: Mapping[str, float], by_item: Mapping[str, Sequence[Float[Tensor, "2 items"]]] | None = None
    ) -> None:
        super().__init__(metrics)
        self.by_item = dict(by_item or {})

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Percentiles of each metric over draws of items with replacement, the same draws for all metrics."""
        if not self.by_item:
            return {}
        means = torch.cat([torch.stack(list(terms)) for terms in self.by_item.values()]).double().cpu()
        means = means[:, :, means[:, 1].sum(0) > 0]  # [means, 2, items]
        items = means.shape[2]
        values = drawn_means(means, _DRAWS)
        ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
        intervals, start = {}, 0
        for name, terms in self.by_item.items():
            # a class that no item of a draw has is left out of the mean, as the metric leaves it out
            drawn = values[:, start : start + len(terms)].nanmean(1) * len(terms)
            low, high = drawn.nanquantile(ends).tolist()
            start += len(terms)
            if low >= high:  # items that are all alike show no spread: no draw differs
                low, high = (len(terms) * end for end in share_interval(self[name] / len(terms), items))
            intervals[name] = low, high
        return intervals


def drawn_means(means: Float[Tensor, "m 2 items"], draws: int) -> Float[Tensor, "draws m"]:
    """Means over items that are drawn with replacement, the same for all means, of sums and counts by item.

    A draw without any item that a mean counts is drawn again; where that does not help, that mean of it is NaN.
    """
    items, stream = means.shape[2], torch.Generator().manual_seed(0)
    values, lacking = torch.full((draws, len(means)), torch.nan, dtype=torch.float64), torch.arange(draws)
    for _ in range(_TRIES):
        for part in torch.split(lacking, max(1, _BLOCK // max(1, items))):
            rows = torch.randint(items, (len(part), items), generator=stream)
            weights = torch.zeros(len(rows), items, dtype=torch.float64)
            weights.scatter_add_(1, rows, torch.ones_like(rows, dtype=torch.float64))
            sums = torch.einsum("di,mki->dmk", weights, means)
            values[part] = sums[..., 0] / sums[..., 1]
        lacking = values.isnan().any(1).nonzero()[:, 0]
    return values


def mean_by_item(values: Tensor, items: Int64[Tensor, " n"]) -> Float[Tensor, "2 items"]:
    """Sums and counts of the values [n] of each item's samples.

    >>> mean_by_item(torch.tensor([100.0, 0.0, 100.0]), torch.tensor([0, 0, 1])).tolist()  # sums, counts
    [[100.0, 100.0], [2.0, 1.0]]
    """
    items = items.cpu()
    return torch.stack([torch.bincount(items, values.double().cpu()), torch.bincount(items).double()])


def items_beside(samples: Samples) -> dict[str, float]:
    """``items``: how many items the samples are of, where these are fewer."""
    items = len(set(samples.items.tolist()))
    return {"items": float(items)} if items < len(samples) else {}
