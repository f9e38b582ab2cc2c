"""Recalls between paired representations, in small galleries drawn from the pairs and in the whole gallery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.reporting.recalls import chance_recall
from polyfed.tasks.recall import ranks, recall_at


class Pairs(NamedTuple):
    """Representations of n samples in two modalities, unit norm, and which samples answer each other."""

    first: Float[Tensor, "n d"]
    second: Float[Tensor, "n d"]
    matches: Int64[Tensor, " n"]

    def at(self, index: Int64[Tensor, " k"]) -> Pairs:
        """Some of the samples."""
        return Pairs(self.first[index], self.second[index], self.matches[index])


def blocks(count: int, size: int, generator: torch.Generator) -> list[Int64[Tensor, " k"]]:
    """A random division into galleries of ``size``; a smaller last one is kept if it has two samples at least.

    A single sample gives no gallery: it would always be found.
    """
    parts = torch.split(torch.randperm(count, generator=generator), size)
    return [part for part in parts if len(part) > 1]


def block_recalls(
    pairs: Pairs, galleries: Sequence[Int64[Tensor, " k"]], cutoffs: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Recalls in percent, ``forward`` (first -> second) and ``backward``, over all samples of all galleries.

    A sample is compared with those of its own gallery only; every sample with its number in ``matches`` is right.
    """
    found: dict[str, list[Tensor]] = {"forward": [], "backward": []}
    for index in galleries:
        part = pairs.at(index)
        found["forward"].append(ranks(part.first, part.second, part.matches, part.matches))
        found["backward"].append(ranks(part.second, part.first, part.matches, part.matches))
    return {name: recall_at(torch.cat(parts), cutoffs) for name, parts in found.items()}


class Side(NamedTuple):
    """Distinct rows of one modality, and the number in ``matches`` of each."""

    values: Float[Tensor, "n d"]
    matches: Int64[Tensor, " n"]


def full_recalls(first: Side, second: Side, cutoffs: Sequence[int]) -> dict[str, dict[int, float]]:
    """Recalls in percent of every distinct row among all distinct rows of the other modality, both ways."""
    there = ranks(first.values, second.values, first.matches, second.matches)
    back = ranks(second.values, first.values, second.matches, first.matches)
    return {"forward": recall_at(there, cutoffs), "backward": recall_at(back, cutoffs)}


def chance(
    queries: Sequence[Int64[Tensor, " q"]], galleries: Sequence[Int64[Tensor, " g"]], cutoffs: Sequence[int]
) -> dict[int, float]:
    """What galleries in random order give, in percent: cutoff -> exact expectation, the mean over all queries.

    Args:
        queries: numbers in ``matches`` of those who search, by gallery.
        galleries: of what each is searched in.
        cutoffs: K of R@K.
    """
    alike = Counter(
        (len(there), positives)
        for searching, there in zip(queries, galleries, strict=True)
        for positives in _positives(searching, there).tolist()
    )
    return {
        cutoff: fmean([chance_recall(size, positives, cutoff) for size, positives in alike], list(alike.values()))
        for cutoff in cutoffs
    }


def _positives(queries: Int64[Tensor, " q"], gallery: Int64[Tensor, " g"]) -> Int64[Tensor, " q"]:
    """How many of a gallery answer each query, without a table of all pairs."""
    values, counts = gallery.unique(return_counts=True)  # type: ignore[no-untyped-call]
    place = torch.searchsorted(values, queries).clamp(max=len(values) - 1)
    return torch.where(values[place] == queries, counts[place], 0)
