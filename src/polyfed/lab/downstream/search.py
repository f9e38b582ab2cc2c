"""What probes by retrieval share: recalls in small galleries drawn from the pairs, and in the full one."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.lab.downstream.bench import Bench, computed
from polyfed.lab.downstream.probe import Probe
from polyfed.lab.downstream.results import ProbeRow
from polyfed.reporting.recalls import chance_recall
from polyfed.tasks.recall import ranks, recall_at

Recalls = dict[str, dict[int, float]]
"""``forward`` (first modality -> second) and ``backward`` -> cutoff -> percent."""


class Gallery(NamedTuple):
    """Representations in one modality, unit norm, and the number in ``Samples.matches`` of each."""

    values: Float[Tensor, "n d"]
    matches: Int64[Tensor, " n"]

    def at(self, index: Int64[Tensor, " k"]) -> Gallery:
        return Gallery(self.values[index], self.matches[index])


def random_blocks(count: int, size: int, generator: torch.Generator) -> list[Int64[Tensor, " k"]]:
    """A random division into galleries of ``size``; a smaller last one is kept if it has two samples at least.

    A single sample gives no gallery: it would always be found.
    """
    parts = torch.split(torch.randperm(count, generator=generator), size)
    return [part for part in parts if len(part) > 1]


def recalls_between(galleries: Sequence[tuple[Gallery, Gallery]], cutoffs: Sequence[int]) -> Recalls:
    """Recalls in percent, both ways, over all samples of all galleries.

    A sample is compared with those of its own gallery only; every one with its number in ``matches`` is right.
    """
    forward = [ranks(a.values, b.values, a.matches, b.matches) for a, b in galleries]
    backward = [ranks(b.values, a.values, b.matches, a.matches) for a, b in galleries]
    return {
        "forward": recall_at(torch.cat(forward), cutoffs),
        "backward": recall_at(torch.cat(backward), cutoffs),
    }


def chance_recalls(
    queries: Sequence[Int64[Tensor, " q"]], galleries: Sequence[Int64[Tensor, " g"]], cutoffs: Sequence[int]
) -> dict[int, float]:
    """What galleries in random order give, in percent: cutoff -> exact expectation, the mean over all queries.

    Args:
        queries: numbers in ``matches`` of those who search, by gallery.
        galleries: of what each is searched in.
        cutoffs: K of R@K.
    """
    alike: Counter[tuple[int, int]] = Counter()  # (size of the gallery, right answers in it) -> queries
    for searching, gallery in zip(queries, galleries, strict=True):
        # by sorted values, as a table of all pairs would not fit into memory
        values, counts = gallery.unique(return_counts=True)  # type: ignore[no-untyped-call]
        place = torch.searchsorted(values, searching).clamp(max=len(values) - 1)
        positives = torch.where(values[place] == searching, counts[place], 0)
        alike.update((len(gallery), number) for number in positives.tolist())
    return {
        cutoff: fmean([chance_recall(size, positives, cutoff) for size, positives in alike], list(alike.values()))
        for cutoff in cutoffs
    }


class Search(Probe):
    """Recalls at small cutoffs, both ways, among the samples of a batch (FedAID, appendix B.2) and among all.

    In-batch: samples are shuffled and divided into galleries of ``batch``; each is looked for among those of its own
    gallery, so the figure depends on the size, which is reported. Full: every distinct picture and text among all.
    Samples with equal ``Samples.matches`` (the item's, or what the source says) are right answers. Ties count against
    the model. ``chance_...`` is what a random order of the same galleries would give, exactly.
    """

    between: tuple[str, str] = Field(default=("image", "text"), description="the two modalities")
    batch: int = Field(default=64, ge=2, description="size of an in-batch gallery")
    cutoffs: tuple[int, ...] = Field(default=(1, 5, 10), min_length=1, description="K of R@K")
    draws: int = Field(default=5, ge=1, description="shuffles into in-batch galleries")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between names '{self.between[0]}' twice; name two modalities")
        if min(self.cutoffs) < 1 or len(set(self.cutoffs)) < len(self.cutoffs):
            raise ValueError(f"cutoffs {list(self.cutoffs)} must be different numbers of at least 1")
        return self

    @abstractmethod
    def where(self, bench: Bench) -> Mapping[str, Samples]:
        """What is searched: name -> samples with both modalities."""

    def of_source(self, bench: Bench, source: str, split: str) -> Samples:
        """Samples of a split with both modalities.

        Raises:
            DataError: none of them can be missed.
        """
        samples = bench.samples(source, split, *self.between)
        if not can_be_missed(samples):
            raise DataError(
                f"'{source}' {split} has {len(samples)} sample(s) and no two that do not answer each other, so that "
                "every search would succeed; take a split with more"
            )
        return samples

    def rows(self, bench: Bench, task: str) -> list[ProbeRow]:
        """Recalls of each of ``where``."""
        return [self._row(bench, task, name, samples) for name, samples in self.where(bench).items()]

    def notes(self) -> list[str]:
        """What the figures depend on."""
        return [
            f"In batches of {self.batch} and (full) among all; gallery of the former: samples of a full batch, and of "
            "the smaller last one if it has two or more. ± over shuffles."
        ]

    def _row(self, bench: Bench, task: str, on: str, samples: Samples) -> ProbeRow:
        subject = bench.subject
        first, second = (
            Gallery(
                F.normalize(computed(subject.embed(name), samples, name, subject, f"'{on}'"), dim=-1), samples.matches
            )
            for name in self.between
        )
        values: dict[str, list[float]] = defaultdict(list)
        for draw in range(bench.draws or self.draws):
            blocks = random_blocks(len(samples), self.batch, bench.stream(task, draw, f"galleries {on}"))
            # in a batch everybody searches, and is searched
            held = [samples.matches[index] for index in blocks]
            by_chance = chance_recalls(held, held, self.cutoffs)
            recalls = recalls_between([(first.at(index), second.at(index)) for index in blocks], self.cutoffs)
            metrics = self._named(recalls) | {f"chance_r@{k}": value for k, value in by_chance.items()}
            for name, value in metrics.items():
                values[name].append(value)
        distinct = {self.between[0]: _distinct(first, samples, self.between[0])}
        distinct[self.between[1]] = _distinct(second, samples, self.between[1])
        sizes = [len(index) for index in blocks]
        facts = {"n": len(samples), "batches": len(blocks), "gallery": max(sizes), "last_gallery": min(sizes)}
        facts |= {f"{name}_gallery_full": len(gallery.matches) for name, gallery in distinct.items()}
        return ProbeRow(on, values | self._full(*distinct.values()), facts)

    def _full(self, a: Gallery, b: Gallery) -> dict[str, list[float]]:
        """Recalls among all, and what chance would give."""
        by_chance = {
            "forward": chance_recalls([a.matches], [b.matches], self.cutoffs),
            "backward": chance_recalls([b.matches], [a.matches], self.cutoffs),
        }
        metrics = self._named(recalls_between([(a, b)], self.cutoffs), "_full")
        metrics |= {f"chance_{name}": value for name, value in self._named(by_chance, "_full").items()}
        return {name: [value] for name, value in metrics.items()}

    def _named(self, recalls: Recalls, suffix: str = "") -> dict[str, float]:
        a, b = self.between
        names = {"forward": f"{a}_to_{b}", "backward": f"{b}_to_{a}"}
        return {f"{names[way]}_r@{k}{suffix}": value for way, by in recalls.items() for k, value in by.items()}


def can_be_missed(samples: Samples) -> bool:
    """Whether a search among samples can fail: there are two at least, and not all are right answers to each other."""
    return len(samples.matches.unique()) > 1  # type: ignore[no-untyped-call]


def _distinct(gallery: Gallery, samples: Samples, modality: str) -> Gallery:
    rows, place = samples.rows[modality].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    first = torch.full((len(rows),), len(place)).scatter_reduce(0, place, torch.arange(len(place)), "amin")
    return gallery.at(first)
