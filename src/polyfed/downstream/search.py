"""What probes by retrieval share: recalls in small galleries and in the full one."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from jaxtyping import Int64
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import DataError
from polyfed.data.samples import Samples
from polyfed.downstream.bench import Bench
from polyfed.downstream.galleries import Pairs, Side, block_recalls, blocks, chance, full_recalls
from polyfed.downstream.probe import Probe
from polyfed.downstream.results import Row
from polyfed.downstream.subject import Subject, computed


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
        samples = bench.pairs(source, split, self.between)
        if not can_be_missed(samples):
            raise DataError(
                f"'{source}' {split} has {len(samples)} sample(s) and no two that do not answer each other, so that "
                "every search would succeed; take a split with more"
            )
        return samples

    def rows(self, bench: Bench, task: str) -> list[Row]:
        """Recalls of each of ``where``."""
        return [self._row(bench, task, name, samples) for name, samples in self.where(bench).items()]

    def notes(self) -> list[str]:
        """What the figures depend on."""
        return [
            f"In batches of {self.batch} and (full) among all; gallery of the former: samples of a full batch, and of "
            "the smaller last one if it has two or more. ± over shuffles."
        ]

    def _row(self, bench: Bench, task: str, on: str, samples: Samples) -> Row:
        subject, where = bench.subject, f"'{on}'"
        first, second = (self._represented(subject, samples, name, where) for name in self.between)
        pairs = Pairs(first, second, samples.matches)
        values: dict[str, list[float]] = {}
        for draw in range(bench.draws or self.draws):
            galleries = blocks(len(samples), self.batch, bench.stream(task, draw, f"galleries {on}"))
            held = [samples.matches[index] for index in galleries]
            by_chance = {f"chance_r@{k}": value for k, value in chance(held, held, self.cutoffs).items()}
            for name, value in (self._named(block_recalls(pairs, galleries, self.cutoffs)) | by_chance).items():
                values.setdefault(name, []).append(value)
        sides = [_distinct(each, samples, name) for each, name in zip((first, second), self.between, strict=True)]
        whole = self._named(full_recalls(sides[0], sides[1], self.cutoffs), "_full") | self._chance_full(sides)
        return Row(
            on, values | {name: [value] for name, value in whole.items()}, self._facts(samples, galleries, sides)
        )

    def _represented(self, subject: Subject, samples: Samples, modality: str, where: str) -> Tensor:
        return F.normalize(computed(subject.embed(modality), samples, modality, subject, where), dim=-1)

    def _named(self, found: Mapping[str, Mapping[int, float]], suffix: str = "") -> dict[str, float]:
        a, b = self.between
        names = {"forward": f"{a}_to_{b}", "backward": f"{b}_to_{a}"}
        return {f"{names[way]}_r@{k}{suffix}": value for way, by in found.items() for k, value in by.items()}

    def _chance_full(self, sides: Sequence[Side]) -> dict[str, float]:
        first, second = ([side.matches] for side in sides)
        ways = {"forward": chance(first, second, self.cutoffs), "backward": chance(second, first, self.cutoffs)}
        return {f"chance_{name}": value for name, value in self._named(ways, "_full").items()}

    def _facts(
        self, samples: Samples, galleries: Sequence[Int64[Tensor, " k"]], sides: Sequence[Side]
    ) -> dict[str, float]:
        sizes = Counter(len(index) for index in galleries)
        facts = {"n": len(samples), "batches": len(galleries), "gallery": max(sizes), "last_gallery": min(sizes)}
        named = zip(self.between, sides, strict=True)
        return {**facts, **{f"{name}_gallery_full": len(side.matches) for name, side in named}}


def can_be_missed(samples: Samples) -> bool:
    """Whether a search among samples can fail: there are two at least, and not all are right answers to each other."""
    return len(samples.matches.unique()) > 1  # type: ignore[no-untyped-call]


def _distinct(values: Tensor, samples: Samples, modality: str) -> Side:
    """One row for each distinct row of the modality's inputs."""
    rows, place = samples.rows[modality].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    first = torch.full((len(rows),), len(place)).scatter_reduce(0, place, torch.arange(len(place)), "amin")
    return Side(values[first], samples.matches[first])
