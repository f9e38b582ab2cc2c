"""Retrieval ranks and recalls: counted in blocks of queries, nothing sorted, ties against the model."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import DataError

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
    """Recall at each cutoff: percent of queries whose rank (from 0) is below it; NaN without queries."""
    below = torch.tensor(cutoffs, dtype=torch.int64, device=ranks.device)[:, None] > ranks
    hits = below.sum(1).tolist()
    return {cutoff: 100.0 * hit / len(ranks) if len(ranks) else nan for cutoff, hit in zip(cutoffs, hits, strict=True)}


def positives_per_query(query_items: Int64[Tensor, " n"], gallery_items: Int64[Tensor, " m"]) -> float:
    """Mean over the queries of the number of gallery entries with the query's item; NaN without queries."""
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
    # what is below is counted, and not what is above: a NaN is neither, and so counts against the model
    below = (scores < best).sum(1, dtype=torch.int32)
    own_below = ((own < best) & owned).sum(1, dtype=torch.int32)
    return (scores.shape[1] - positives) - (below - own_below)
