"""Metrics from logits, masks and representations, and their 95 % intervals over items.

Ties and NaN count against the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.distributions import LEVEL, share_interval
from polyfed.core.errors import DataError
from polyfed.data.samples import Samples

_TOP5_CLASSES = 10  # with fewer classes, five guesses mean little


def label_ranks(logits: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """Rank from 0 of the true class: how many other classes score at least as high, or NaN.

    >>> label_ranks(torch.tensor([[0.1, 0.9], [0.5, 0.5]]), torch.tensor([1, 0]))  # a tie counts against the model
    tensor([0, 1])
    """
    return logits.shape[1] - 1 - (logits < logits.gather(1, labels[:, None])).sum(1)


def sole_best(logits: Float[Tensor, "n c *pixels"]) -> Int64[Tensor, " n *pixels"]:
    """The class that scores higher than all others; -1 where another scores as high, or NaN.

    >>> sole_best(torch.tensor([[0.1, 0.9], [0.5, 0.5]]))
    tensor([ 1, -1])
    """
    best, classes = logits.max(1)
    return classes.where((logits < best[:, None]).sum(1) == logits.shape[1] - 1, -1)


def predictions(
    logits: Float[Tensor, "n c"], labels: Int64[Tensor, " n"], ranks: Int64[Tensor, " n"]
) -> Int64[Tensor, " n"]:
    """The class with the highest score; where the true class shares it, one of the others.

    ``ranks`` are the ``label_ranks`` of the same logits, so that a prediction is right where the rank is 0.

    >>> logits, labels = torch.tensor([[0.1, 0.9], [0.5, 0.5]]), torch.tensor([1, 0])
    >>> predictions(logits, labels, label_ranks(logits, labels))
    tensor([1, 1])
    """
    return torch.where(ranks == 0, labels, logits.scatter(1, labels[:, None], -torch.inf).argmax(1))


def top(ranks: Int64[Tensor, " n"], k: int) -> Float[Tensor, ""]:
    """Percent of samples whose true class is among the ``k`` highest.

    >>> float(top(torch.tensor([0, 3, 7, 1]), k=2))
    50.0
    """
    return 100.0 * (ranks < k).double().mean()


def balanced_accuracy(predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int) -> Float[Tensor, ""]:
    """Mean recall, in percent, over the classes that occur.

    >>> float(balanced_accuracy(torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]), classes=2))
    50.0
    """
    hits, support, _ = _counts(predicted, labels, classes)
    return 100.0 * (hits / support)[support > 0].mean()


def macro_f1(predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int) -> Float[Tensor, ""]:
    """Mean F1 score, in percent, over the classes that occur or are predicted.

    >>> round(float(macro_f1(torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]), classes=2)), 1)
    40.0
    """
    hits, support, claimed = _counts(predicted, labels, classes)
    sizes = support + claimed
    return 100.0 * (2 * hits / sizes)[sizes > 0].mean()


def accuracies(
    ranks: Int64[Tensor, " n"], predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int
) -> dict[str, float]:
    """``accuracy``, ``top5`` (from 10 classes on), ``balanced_accuracy`` and ``macro_f1``, in percent.

    Each comes with ``<name>_of_constant``: the highest that one answer to all samples reaches.
    """
    shares = torch.bincount(labels, minlength=classes).double() / len(labels)
    occurring, best = int((shares > 0).sum()), float(shares.max())
    metrics = {"accuracy": (top(ranks, 1), best)}
    if classes >= _TOP5_CLASSES:
        metrics["top5"] = top(ranks, 5), float(shares.topk(5).values.sum())
    metrics["balanced_accuracy"] = balanced_accuracy(predicted, labels, classes), 1 / occurring
    metrics["macro_f1"] = macro_f1(predicted, labels, classes), 2 * best / (1 + best) / occurring
    constant = {f"{name}_of_constant": 100.0 * share for name, (_, share) in metrics.items()}
    return {name: float(value) for name, (value, _) in metrics.items()} | constant


def _counts(
    predicted: Int64[Tensor, " n"], labels: Int64[Tensor, " n"], classes: int
) -> tuple[Float[Tensor, " c"], ...]:
    groups = (labels[predicted == labels], labels, predicted)
    return tuple(torch.bincount(group, minlength=classes).double() for group in groups)


BLOCK_SCORES = 1 << 22  # scores held at a time: 16 MiB in fp32, small enough to stay near the caches
_TILE = 64  # both sides are padded to this, so that equal rows score bit-equal whatever their position


def ranks(
    queries: Float[Tensor, "n d"],
    gallery: Float[Tensor, "m d"],
    query_items: Int64[Tensor, " n"],
    gallery_items: Int64[Tensor, " m"],
    *,
    block_scores: int = BLOCK_SCORES,
) -> Int64[Tensor, " n"]:
    """Rank from 0 of each query's best positive: how many non-positives score at least as high.

    A gallery entry is a positive of a query when both have the same item number; a query may have any
    number of them. Logits are dot products, in fp32 at least. A tie counts against the model, and so does a
    score that is NaN, of a positive or of another entry. Memory beyond the arguments is one copy of the
    gallery and a few times ``block_scores`` scores (64 queries at a time at least).

    Raises:
        DataError: a query has no positive in the gallery.

    >>> queries = gallery = torch.eye(3)
    >>> ranks(queries, gallery, torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1]))
    tensor([0, 2, 2])
    """
    # entries of an item stand together, so that a query's positives are a run of columns
    order = gallery_items.argsort(stable=True)
    first, positives = _runs(query_items, gallery_items[order])
    lonely = (positives == 0).nonzero()
    if len(lonely):
        query = int(lonely[0])
        raise DataError(
            f"query {query} (item {int(query_items[query])}) has no positive in the gallery; "
            "evaluate only items that both sides hold"
        )
    if not len(queries):
        return first
    entries = gallery[order]
    # padded once for all queries
    tiled = _tiled(entries if entries.dtype == torch.float64 else entries.float())
    # whole tiles, at least one, so that no work goes into padding
    size = max(_TILE, block_scores // max(1, len(tiled)) // _TILE * _TILE)
    blocks = []
    with torch.autocast(queries.device.type, enabled=False):
        for rows in (slice(start, start + size) for start in range(0, len(queries), size)):
            part = queries[rows].to(tiled.dtype)
            scores = (_tiled(part) @ tiled.T)[: len(part), : len(gallery)]
            blocks.append(_block_ranks(scores, first[rows], positives[rows]))
    return torch.cat(blocks)


def recall_at(ranks: Int64[Tensor, " n"], cutoffs: Sequence[int]) -> dict[int, float]:
    """Recall at each cutoff: percent of queries whose rank (from 0) is below it; NaN without queries.

    >>> recall_at(torch.tensor([0, 3, 7, 1]), cutoffs=(1, 5))
    {1: 25.0, 5: 75.0}
    """
    hits = (torch.tensor(cutoffs, dtype=torch.int64, device=ranks.device)[:, None] > ranks).sum(1).tolist()
    return {cutoff: 100.0 * hit / len(ranks) if len(ranks) else nan for cutoff, hit in zip(cutoffs, hits, strict=True)}


def positives_per_query(query_items: Int64[Tensor, " n"], gallery_items: Int64[Tensor, " m"]) -> float:
    """Mean over the queries of the number of gallery entries with the query's item; NaN without queries.

    >>> positives_per_query(torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1]))
    2.0
    """
    _, positives = _runs(query_items, gallery_items.sort().values)
    return int(positives.sum()) / len(positives) if len(positives) else nan


def _runs(
    items: Int64[Tensor, " n"], sorted_items: Int64[Tensor, " m"]
) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    first = torch.searchsorted(sorted_items, items)
    return first, torch.searchsorted(sorted_items, items, right=True) - first


def _tiled(x: Float[Tensor, "n d"]) -> Float[Tensor, "padded d"]:
    return F.pad(x, (0, 0, 0, -len(x) % _TILE))


def _block_ranks(
    scores: Float[Tensor, "b m"], first: Int64[Tensor, " b"], positives: Int64[Tensor, " b"]
) -> Int64[Tensor, " b"]:
    """Ranks of a block; the positives of row i are ``positives[i]`` columns from ``first[i]`` on.

    They are read out of the same product as the scores that they are compared with: computed apart they would
    round differently, and ties would no longer be ties.
    """
    offset = torch.arange(int(positives.max()), device=scores.device)
    owned = offset < positives[:, None]
    own = scores.gather(1, (first[:, None] + offset).clamp_(max=scores.shape[1] - 1))
    best = own.masked_fill(~owned | own.isnan(), -torch.inf).amax(1, keepdim=True)
    # scores below are counted, not those above: a NaN is neither, and so counts against the model
    below = (scores < best).sum(1, dtype=torch.int32)
    return (scores.shape[1] - positives) - (below - ((own < best) & owned).sum(1, dtype=torch.int32))


Counts = Int[Tensor, "*n classes 3"]
"""Pixels of each class that are predicted and true, predicted, true."""


def overlaps(predicted: Int[Tensor, "n h w"], masks: Int[Tensor, "n h w"], classes: int) -> Int[Tensor, "n classes 3"]:
    """``Counts`` of each image.

    A pixel whose true value is not a class is left out; a predicted value that is not a class is always wrong.

    >>> overlaps(torch.tensor([[[1, 1, 0]]]), torch.tensor([[[1, 0, 0]]]), classes=2)
    tensor([[[1, 1, 2],
             [1, 2, 1]]])
    """
    predicted = predicted.where((masks >= 0) & (masks < classes), -1)
    # class by class: memory does not grow with their number
    sides = ((predicted == number, masks == number) for number in range(classes))
    return torch.stack([torch.stack([(a & b).sum((1, 2)), a.sum((1, 2)), b.sum((1, 2))], 1) for a, b in sides], 1)


def dice(counts: Counts) -> Float[Tensor, "*n classes"]:
    """2 |A and B| / (|A| + |B|) in float64; NaN where a class is neither predicted nor true.

    >>> dice(torch.tensor([[1, 2, 1]])).item()  # one pixel is both, two are predicted, one is true
    0.6666666666666666
    """
    both, predicted, true = counts.double().unbind(-1)
    return 2 * both / (predicted + true)


def iou(counts: Counts) -> Float[Tensor, "*n classes"]:
    """|A and B| / |A or B| in float64; NaN where a class is neither predicted nor true.

    >>> iou(torch.tensor([[1, 2, 1]])).item()
    0.5
    """
    both, predicted, true = counts.double().unbind(-1)
    return both / (predicted + true - both)


def dice_of_constant(counts: Int[Tensor, "classes 3"], first: int = 0) -> Float[Tensor, ""]:
    """Mean Dice of the best mask that has one class everywhere, the chance level; 1 where it is undefined.

    Args:
        counts: sums over all images.
        first: first class that counts in the mean.
    """
    true = counts[:, 2]
    everywhere = torch.eye(len(true), dtype=torch.bool, device=true.device)
    constant = torch.stack([true * everywhere, true.sum() * everywhere, true.expand(len(true), -1)], -1)
    return dice(constant)[:, first:].nanmean(1).nan_to_num(1.0).max()


def mean_dice(predicted: Bool[Tensor, "n h w"], masks: Bool[Tensor, "n h w"]) -> Float[Tensor, ""]:
    """Dice of each image, then the mean, in percent; NaN without images.

    An image whose mask is empty scores 1 if nothing is predicted in it, else 0 (FedAID, appendix B.2).

    >>> masks = torch.tensor([[[True, False]], [[False, False]]])
    >>> float(mean_dice(masks, masks)), float(mean_dice(~masks, masks))
    (100.0, 0.0)
    """
    return 100.0 * dice(overlaps(predicted.int(), masks.int(), 2))[:, 1].nan_to_num(1.0).mean()


_DRAWS = 1000
_TRIES = 30  # for a draw that lacks all items of a class
_BLOCK = 1 << 20  # weights of items held at a time


class TaskScores(dict[str, float]):
    """Metrics of a task.

    Samples of one item (captions of an image, questions on it) are not independent trials: intervals are over items.

    Args:
        metrics: name -> value.
        by_item: metric -> means whose sum it is, each as sums and counts by item.
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
            # a class without items in a draw is left out of the mean, as in the metric
            low, high = (values[:, start : start + len(terms)].nanmean(1) * len(terms)).nanquantile(ends).tolist()
            start += len(terms)
            if low >= high:  # items that are all alike show no spread: no draw differs
                low, high = (len(terms) * end for end in share_interval(self[name] / len(terms), items))
            intervals[name] = low, high
        return intervals


def drawn_means(means: Float[Tensor, "m 2 items"], draws: int) -> Float[Tensor, "draws m"]:
    """Means over items that are drawn with replacement, the same for all means, of sums and counts by item.

    A draw that lacks all items of a mean is drawn again; if that does not help, this mean is NaN.
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
    """``items``: number of the samples' items, where these are fewer."""
    items = len(set(samples.items.tolist()))
    return {"items": float(items)} if items < len(samples) else {}
