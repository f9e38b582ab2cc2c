"""Retrieval between two modalities: on clients' own test samples, a data set, or data sets that nobody trained on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar, NamedTuple, Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.lab.downstream.probe import Bench, Outcome, Probe, ProbeRow, computed
from polyfed.tasks.metrics import ranks, recall_at

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
    return {"forward": recall_at(torch.cat(forward), cutoffs), "backward": recall_at(torch.cat(backward), cutoffs)}


class RetrievalProbe(Probe):
    """Recalls on every client's own test samples, or on a data set (FedAID, arXiv 2404.03854, appendix B.2).

    Both ways, at small cutoffs, in batches as the paper's: samples are shuffled and divided into galleries of
    ``batch``; each is looked for among those of its own gallery, so the figure depends on the size, which is reported
    (``polyfed evaluate`` searches among all). Samples with equal ``Samples.matches`` (the item's, or what the source
    says) are right answers. Ties count against the model.

    Without a ``source`` every client's own test samples are searched; the mean over clients, the worst client and the
    disparity (best less worst) are added. Clients whose every search would succeed, as they have a single sample, are
    left out, and named in the notes.
    """

    short_name: ClassVar[str] = "retrieval"

    source: str | None = Field(default=None, description="name of a source; None: the clients' own test samples")
    split: str = Field(default="test", description="split of the source")
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

    def unsuitable(self, bench: Bench) -> str | None:
        """The model does not encode both modalities, or there are no clients to search."""
        if self.source is None and bench.subject.clients is None:
            return f"{bench.subject.name} has no clients; give a run, or a source to search"
        return bench.subject.lacks(self.between)

    def check(self, bench: Bench, task: str) -> None:
        """Split and columns, or that a client has both modalities; and that there is something to search."""
        if self.source is not None:
            bench.require(task, self.source, [self.split], self.between)
        if not self.where(bench):  # of a source this raises, and says why
            both = " and ".join(self.between)
            raise DataError(f"tasks.{task}: no client has two test samples with {both} that do not answer each other")

    def where(self, bench: Bench) -> Mapping[str, Samples]:
        """What is searched: the split of the source, or clients' test samples.

        Raises:
            DataError: no sample of the source can be missed.
        """
        if self.source is not None:
            samples = bench.samples(self.source, self.split, *self.between)
            if not can_be_missed(samples):
                raise DataError(
                    f"'{self.source}' {self.split} has {len(samples)} sample(s) and no two that do not answer each "
                    "other, so that every search would succeed; take a split with more"
                )
            return {self.split: samples}
        return {name: tests for name, tests in self._paired(bench).items() if can_be_missed(tests)}

    def run(self, bench: Bench, task: str) -> Outcome:
        rows = [self._row(bench, task, name, samples) for name, samples in self.where(bench).items()]
        notes = [
            f"In batches of {self.batch}; gallery: samples of a full batch, and of the smaller last one if it has two "
            "or more. ± over shuffles."
        ]
        if self.source is not None:
            return Outcome(self.source, rows, notes)
        names = [name for name, tests in self._paired(bench).items() if not can_be_missed(tests)]
        reason = "with a single test sample, or none that do not answer each other"
        left_out = [f"Left out, {reason}: {', '.join(names)}."] if names else []
        return Outcome("clients' own test samples", [*rows, *_over_clients(rows)], [*notes, *left_out])

    def _paired(self, bench: Bench) -> dict[str, Samples]:
        every = bench.subject.clients() if bench.subject.clients is not None else {}
        return {name: tests for name, tests in every.items() if set(self.between) <= set(tests.inputs) and len(tests)}

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
            recalls = recalls_between([(first.at(index), second.at(index)) for index in blocks], self.cutoffs)
            for name, value in self._named(recalls).items():
                values[name].append(value)
        sizes = [len(index) for index in blocks]
        facts = {"n": len(samples), "batches": len(blocks), "gallery": max(sizes), "last_gallery": min(sizes)}
        return ProbeRow(on, values, facts)

    def _named(self, recalls: Recalls) -> dict[str, float]:
        a, b = self.between
        names = {"forward": f"{a}_to_{b}", "backward": f"{b}_to_{a}"}
        return {f"{names[way]}_r@{k}": value for way, by in recalls.items() for k, value in by.items()}


def can_be_missed(samples: Samples) -> bool:
    """Whether a search among samples can fail: there are two at least, and not all are right answers to each other."""
    return len(samples.matches.unique()) > 1  # type: ignore[no-untyped-call]


def _over_clients(rows: Sequence[ProbeRow]) -> list[ProbeRow]:
    """Mean over clients, worst client and disparity of every metric, draw by draw."""
    summaries: dict[str, Callable[[Sequence[float]], float]] = {
        "mean over clients": fmean,
        "worst client": min,
        "disparity": lambda values: max(values) - min(values),
    }
    by_metric = {metric: list(zip(*(row.values[metric] for row in rows), strict=True)) for metric in rows[0].values}
    return [
        ProbeRow(on, {metric: list(map(summary, draws)) for metric, draws in by_metric.items()}, {"clients": len(rows)})
        for on, summary in summaries.items()
    ]
