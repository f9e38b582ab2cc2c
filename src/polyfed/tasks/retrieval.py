"""Retrieval of one modality by another, by the pair losses of CreamFL and CLIP, and by ConVIRT's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from jaxtyping import Float, Int64
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator
from polyfed.core.settings import require_default
from polyfed.data.samples import Batch, Samples
from polyfed.losses.info_nce import InfoNCE, Reduction
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.models.aligner import Detail
from polyfed.models.model import Embedder, Model
from polyfed.tasks import encoded_rows, evaluating
from polyfed.tasks.metrics import TaskScores, mean_by_item, positives_per_query, ranks, recall_at
from polyfed.tasks.task import AnySamples, Task

_T = TypeVar("_T")


class PairTask(Task):
    """Match the two modalities of a sample among all others; subclasses define the loss.

    Right answers to a query are the samples of equal ``matches``: of the same item, unless the source defines more.
    Samples that lack one of the two modalities are left out.

    Metrics, in percent, for each direction and cutoff: ``<a>_to_<b>_r@<k>``; their sum at cutoff 1 over
    directions and protocols is ``r1_sum``, the primary metric (with ``folds: [5, 1]`` on 5,000 images it
    is the R@1_sum of CreamFL and FedCola). They depend on further metrics: ``gallery_<b>`` (entries
    that a query is compared with, mean over folds), ``folds`` and ``<a>_to_<b>_positives_per_query``. Where
    ``folds`` names several protocols, all but ``r1_sum`` end in ``_full`` or ``_<n>fold``. Ties count
    against the model.

    ``in_batch: B`` adds FedAID's recalls among the B samples of a batch: names end in ``_batch<B>``, values
    are means over all queries, and so is ``gallery_<b>_batch<B>``. They are not part of ``r1_sum``.
    """

    between: tuple[str, str] = Field(default=("image", "text"), description="the two modalities")
    mask_siblings: bool = Field(default=False, description="right answers to each other are left out as negatives")
    folds: tuple[int, ...] = Field(default=(1,), min_length=1, description="folds of items that recalls are means over")
    fold_seed: int | None = Field(default=None, description="seed of the folds' shuffle; None: contiguous, in order")
    cutoffs: tuple[int, ...] = Field(default=(1, 5, 10), description="K of R@K; 1 is among them")
    in_batch: int | None = Field(default=None, ge=2, description="size of shuffled blocks with recalls of their own")

    @field_validator("folds", "cutoffs", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @field_validator("folds", "cutoffs")
    @classmethod
    def _distinct(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if min(value, default=1) < 1 or len(set(value)) < len(value):
            raise ValueError(f"{list(value)} must be different numbers of at least 1")
        return value

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between names '{self.between[0]}' twice; name two modalities")
        if 1 not in self.cutoffs:
            raise ValueError(f"cutoffs {list(self.cutoffs)} lack 1, which the primary metric needs; add it")
        return self

    @property
    def compared(self) -> frozenset[str]:
        return frozenset(self.between)

    @property
    def primary(self) -> str:
        """``r1_sum``: R@1 summed over directions and protocols."""
        return "r1_sum"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """See ``Task``."""
        suffixes = [*map(self._suffix, self.folds), *([f"_batch{self.in_batch}"] if self.in_batch else [])]
        directions = [(f"{a}_to_{b}", b) for a, b in self._directions]
        recalls = [f"{name}_r@{k}{end}" for end in suffixes for name, _ in directions for k in self.cutoffs]
        context = [
            text + end
            for end in suffixes
            for name, b in directions
            for text in (f"gallery_{b}", f"{name}_positives_per_query", "folds")
        ]
        return self.primary, *recalls, *dict.fromkeys(context)

    def usable(self, samples: AnySamples) -> AnySamples:
        """Samples with both modalities."""
        return samples.having(*self.between)

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        """``pair_loss`` of the samples that have both modalities; 0 if none has."""
        pairs = self.usable(batch)
        return self.pair_loss(model, head, pairs) if len(pairs) else batch.no_loss

    def pair_loss(self, model: Embedder, head: nn.Module | None, pairs: Batch) -> Tensor:
        """Loss of a batch in which all samples have both modalities; by default the head's.

        Raises:
            ConfigError: the task needs features by position, and the model gives none.
        """
        loss: Tensor = self.require_head(head)(*self.represent(model, pairs), self.siblings(pairs))
        return loss

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Recalls and the sizes that they depend on; every distinct row of a modality is encoded once.

        Raises:
            ConfigError: the samples lack one of the two modalities.
            DataError: there are fewer items than folds.
        """
        self.require(samples)
        samples = self.usable(samples)
        items, needed = len(set(samples.items.tolist())), max(self.folds)
        if items < needed:
            raise DataError(f"{items} items cannot make {needed} folds; lower folds or test on more items")
        with evaluating(model):
            encoded = {modality: _encode(model, modality, samples, batch_size) for modality in self.between}
            sides = {modality: side for modality, (side, _) in encoded.items()}
            protocols = {self._suffix(count): self._recalls(sides, count) for count in self.folds}
            # blocks of a batch come later: their recalls are easier, and would flatter the sum
            firsts = [f"{a}_to_{b}_r@1" for a, b in self._directions]
            first = sum(recalls[name] for recalls in protocols.values() for name in firsts)
            if self.in_batch is not None:
                # sample by sample, as in training: a row that several samples share comes several times
                pairs = {modality: side.at(index) for modality, (side, index) in encoded.items()}
                protocols[f"_batch{self.in_batch}"] = TaskScores(self._in_batches(pairs, self.in_batch))
        return TaskScores({self.primary: first} | _suffixed(protocols), self._by_item(protocols))

    def _by_item(self, protocols: Mapping[str, TaskScores]) -> dict[str, Sequence[Tensor]]:
        by_item = _suffixed({suffix: recalls.by_item for suffix, recalls in protocols.items()})
        firsts = [f"{a}_to_{b}_r@1{self._suffix(count)}" for count in self.folds for a, b in self._directions]
        return by_item | {self.primary: [by_item[name][0] for name in firsts]}

    def judge(self, representations: Mapping[str, Float[Tensor, "n d"]], samples: Samples) -> float | None:
        """``r1_sum`` among all samples in one fold, the first of samples with equal input; None without a modality."""
        if any(modality not in representations for modality in self.between):
            return None
        sides = {}
        for modality in self.between:
            inverse_index = samples.distinct(modality)[1]
            # backwards, so that the first sample of an input is written last
            backwards = torch.arange(len(inverse_index) - 1, -1, -1)
            first = torch.zeros(int(inverse_index.max()) + 1, dtype=torch.int64)
            first = first.index_put((inverse_index[backwards],), backwards)
            values = representations[modality]
            numbers = (samples.items[first].to(values.device), samples.matches[first].to(values.device))
            sides[modality] = _Side(values[first.to(values.device)], *numbers)
        metrics = self._compare(sides)
        return sum(metrics[f"{a}_to_{b}_r@1"] for a, b in self._directions)

    def require(self, samples: Samples) -> None:
        """Raise ConfigError if the samples lack one of the two modalities."""
        # before any encoding, so that a wrong task fails at once
        if missing := [modality for modality in self.between if modality not in samples.inputs]:
            raise ConfigError(
                f"{self.component_name()} between {list(self.between)} needs '{missing[0]}', which samples with "
                f"{list(samples.modalities)} lack; give this participant another task or that modality"
            )

    def represent(self, model: Embedder, batch: Batch) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
        """Representations of both modalities of a batch."""
        first, second = (model.represent(name, batch.inputs[name]) for name in self.between)
        return first, second

    def detail(self, model: Embedder, batch: Batch) -> tuple[Detail, Detail]:
        """The model's features of both modalities of a batch, by position.

        Raises:
            ConfigError: the model gives no features by position.
        """
        first, second = (self.by_position(model, "detail")(name, batch.inputs[name]) for name in self.between)
        return first, second

    def require_detail(self, model: Model) -> None:
        """Raise ConfigError if the model does not give features by position of both modalities."""
        for modality in self.between:
            model.require_detail(modality)

    def siblings(self, batch: Batch) -> Int64[Tensor, " b"] | None:
        """Groups whose samples are not each other's negatives, one number a sample; None: all are negatives."""
        return batch.matches if self.mask_siblings else None

    @property
    def contrast_reduction(self) -> Reduction:
        return "mean"

    @property
    def _directions(self) -> tuple[tuple[str, str], tuple[str, str]]:
        first, second = self.between
        return (first, second), (second, first)

    def _suffix(self, folds: int) -> str:
        return "" if len(self.folds) == 1 else "_full" if folds == 1 else f"_{folds}fold"

    def _recalls(self, sides: Mapping[str, _Side], folds: int) -> TaskScores:
        """Means over folds, whose sizes in items differ by one at most."""
        items = torch.unique(sides[self.between[0]].items)
        if self.fold_seed is not None:
            items = items[torch.randperm(len(items), generator=generator(self.fold_seed, "folds")).to(items.device)]
        parts = items.tensor_split(folds)
        results = [self._compare({name: side.of(part) for name, side in sides.items()}) for part in parts]
        means = {name: fmean(result[name] for result in results) for name in results[0]}
        size = int(items.max()) + 1
        by_item = {
            name: [sum((_share(result.by_item[name][0], size) for result in results), torch.zeros(2, size).double())]
            for name in results[0].by_item
        }
        return TaskScores(means | {"folds": float(folds)}, by_item)

    def _in_batches(self, pairs: Mapping[str, _Side], size: int) -> dict[str, float]:
        """Means over all queries of the recalls in each block of aligned samples."""
        values = pairs[self.between[0]].values
        order = torch.randperm(len(values), generator=generator(self.fold_seed or 0, "batches")).to(values.device)
        blocks = list(torch.split(order, size))
        if len(blocks) > 1 and len(blocks[-1]) < 2:  # a single sample is always retrieved: it joins the block before
            blocks[-2:] = [torch.cat(blocks[-2:])]
        results = [self._compare({name: side.at(block) for name, side in pairs.items()}) for block in blocks]
        weights = [len(block) for block in blocks]
        return {name: fmean((result[name] for result in results), weights) for name in results[0]}

    def _compare(self, sides: Mapping[str, _Side]) -> TaskScores:
        metrics: dict[str, float] = {}
        by_item: dict[str, list[Tensor]] = {}
        for source, target in self._directions:
            queries, gallery = sides[source], sides[target]
            positions = ranks(queries.values, gallery.values, queries.matches, gallery.matches)
            name = f"{source}_to_{target}"
            metrics |= {f"{name}_r@{cutoff}": recall for cutoff, recall in recall_at(positions, self.cutoffs).items()}
            for cutoff in self.cutoffs:
                by_item[f"{name}_r@{cutoff}"] = [mean_by_item(100.0 * (positions < cutoff), queries.items)]
            metrics[f"gallery_{target}"] = float(len(gallery.matches))
            metrics[f"{name}_positives_per_query"] = positives_per_query(queries.matches, gallery.matches)
        return TaskScores(metrics, by_item)


@dataclass(frozen=True)
class _Side:
    """Representations of rows of one modality, with the item of each and the group of its right answers."""

    values: Float[Tensor, "n d"]
    items: Int64[Tensor, " n"]
    matches: Int64[Tensor, " n"]

    def of(self, items: Int64[Tensor, " k"]) -> _Side:
        """The rows of ``items``."""
        return self.at(torch.isin(self.items, items).nonzero()[:, 0])

    def at(self, index: Int64[Tensor, " k"]) -> _Side:
        """The rows at ``index``."""
        return _Side(self.values[index], self.items[index], self.matches[index])


def _share(sums: Float[Tensor, "2 k"], size: int) -> Float[Tensor, "2 size"]:
    """Sums and counts of a fold's items among all, so that every fold counts alike."""
    return F.pad(sums, (0, size - sums.shape[1])) / sums[1].sum()


def _suffixed(protocols: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    return {f"{name}{suffix}": value for suffix, recalls in protocols.items() for name, value in recalls.items()}


def _encode(
    model: Embedder, modality: str, samples: Samples, batch_size: int
) -> tuple[_Side, Int64[Tensor, " samples"]]:
    """Every distinct row, and the row of each sample."""
    values, inverse_index = encoded_rows(model.represent, model.device, modality, samples, batch_size)
    # all samples of a row have its item, so that any of them may write it
    numbers = samples.items.to(model.device), samples.matches.to(model.device)
    items, matches = (own.new_empty(len(values)).scatter_(0, inverse_index, own) for own in numbers)
    return _Side(values, items, matches), inverse_index


_OF_OBJECTIVES = {"soft_contrastive": ("shift", "scale", "reduction"), "info_nce": ("temperature", "learn_temperature")}


class PairRetrieval(PairTask):
    """A contrastive loss of pairs; for metrics see ``PairTask``."""

    short_name: ClassVar[str] = "retrieval"
    shapes_head: ClassVar[tuple[str, ...] | None] = ("objective", "reduction", "learn_temperature")

    objective: Literal["soft_contrastive", "info_nce"] = Field(
        default="soft_contrastive", description="loss: PCME's pair loss (CreamFL, FedAFD) or InfoNCE (CLIP)"
    )
    shift: float = Field(default=15.0, description="soft contrastive: first value of the learnable b")
    scale: float = Field(default=15.0, gt=0, description="soft contrastive: first value of the learnable a")
    reduction: Reduction = Field(default="sum", description="soft contrastive: the papers' sum needs gradient clipping")
    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="InfoNCE: (first) temperature")
    learn_temperature: bool = Field(default=True, description="InfoNCE: whether the temperature is learnt")

    @model_validator(mode="after")
    def _settings_fit_objective(self) -> Self:
        for objective, own in _OF_OBJECTIVES.items():
            if objective != self.objective:
                require_default(self, f"with objective: {self.objective}", *own)
        return self

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The loss module with its learnable scalars.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        if self.objective == "info_nce":
            return InfoNCE(self.temperature, learnable=self.learn_temperature)
        return SoftContrastive(self.shift, self.scale, reduction=self.reduction)


class ConVIRT(PairTask):
    """Retrieve the second modality of a sample by its first, and the other way round; for metrics see ``PairTask``.

    The paper has ``temperature: 0.1, learn_temperature: false, weight: 0.75`` with images first. The image-text
    contrast of FedAID's released code is ``learn_temperature: false, reduction: sum``.
    """

    short_name: ClassVar[str] = "convirt"
    shapes_head: ClassVar[tuple[str, ...] | None] = ("learn_temperature", "weight", "reduction")

    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="(first) temperature; 0.1 in the paper")
    learn_temperature: bool = Field(default=True, description="whether the temperature is learnt")
    weight: float = Field(default=0.5, ge=0, le=1, description="weight of the direction first to second (0.75 there)")
    reduction: Reduction = Field(default="mean", description="over directions; FedAID's code has sum, twice the mean")

    @property
    def contrast_reduction(self) -> Reduction:
        """Value of ``reduction``."""
        return self.reduction

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The loss module with its temperature.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        return InfoNCE(self.temperature, learnable=self.learn_temperature, weight=self.weight, reduction=self.reduction)
