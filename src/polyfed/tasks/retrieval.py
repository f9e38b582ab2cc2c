"""Retrieval of one modality by another: a contrastive loss of pairs, and recalls in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from polyfed.data.samples import Batch, Samples
from polyfed.errors import ConfigError, DataError
from polyfed.losses.info_nce import InfoNCE
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.models.model import Embedder
from polyfed.randomness import generator
from polyfed.tasks import evaluating
from polyfed.tasks.recall import positives_per_query, ranks, recall_at
from polyfed.tasks.task import Task

_OWN_SETTINGS = {
    "soft_contrastive": ("shift", "scale", "reduction"),
    "info_nce": ("temperature", "learn_temperature"),
}


class Retrieval(Task):
    """Match the two modalities of a sample among all others.

    Metrics, in percent, for each direction and cutoff: ``<a>_to_<b>_r@<k>``; their sum at cutoff 1 over
    directions and protocols is ``r1_sum``, the primary metric (with ``folds: [5, 1]`` on 5,000 pictures it
    is the R@1_sum of CreamFL and FedCola). What they depend on stands beside them: ``gallery_<b>`` (entries
    that a query is compared with, mean over folds), ``folds`` and ``<a>_to_<b>_positives_per_query``. Where
    ``folds`` names several protocols, all but ``r1_sum`` end in ``_full`` or ``_<n>fold``. Ties count
    against the model.
    """

    between: tuple[str, str] = Field(default=("image", "text"), description="the two modalities")
    objective: Literal["soft_contrastive", "info_nce"] = Field(
        default="soft_contrastive", description="loss: PCME's pair loss (CreamFL, FedAFD) or InfoNCE (CLIP)"
    )
    shift: float = Field(default=15.0, description="soft contrastive: first value of the learnable b")
    scale: float = Field(default=15.0, gt=0, description="soft contrastive: first value of the learnable a")
    reduction: Literal["sum", "mean"] = Field(
        default="sum",
        description="soft contrastive: over pairs; the sum of the papers needs gradient clipping",
    )
    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="InfoNCE: (first) temperature")
    learn_temperature: bool = Field(default=True, description="InfoNCE: whether the temperature is learnt")
    mask_siblings: bool = Field(
        default=False,
        description="whether samples of one item in a batch are left out as each other's negatives",
    )
    folds: tuple[int, ...] = Field(
        default=(1,),
        min_length=1,
        description="recalls are means over this many folds of items; several: each",
    )
    fold_seed: int | None = Field(default=None, description="seed of the folds' shuffle; None: contiguous, in order")
    cutoffs: tuple[int, ...] = Field(default=(1, 5, 10), description="K of R@K; 1 is among them")

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
    def _consistent(self) -> Self:
        if self.between[0] == self.between[1]:
            raise ValueError(f"between names '{self.between[0]}' twice; name two modalities")
        if 1 not in self.cutoffs:
            raise ValueError(f"cutoffs {list(self.cutoffs)} lack 1, which the primary metric needs; add it")
        unused = [key for name, keys in _OWN_SETTINGS.items() if name != self.objective for key in keys]
        for key in unused:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with objective '{self.objective}'; remove it")
        return self

    @property
    def primary(self) -> str:
        """``r1_sum``: R@1 summed over directions and protocols."""
        return "r1_sum"

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The loss module with its learnable scalars.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self._require(samples)
        if self.objective == "info_nce":
            return InfoNCE(self.temperature, learnable=self.learn_temperature)
        return SoftContrastive(self.shift, self.scale, reduction=self.reduction)

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        """Contrastive loss of the batch's pairs."""
        if head is None:
            raise TypeError("retrieval needs the module that its head() made")
        u, v = (model.represent(modality, batch.inputs[modality]) for modality in self.between)
        loss: Tensor = head(u, v, batch.items if self.mask_siblings else None)
        return loss

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        """Recalls and what they depend on; every distinct row of a modality is encoded once.

        Raises:
            ConfigError: the samples lack one of the two modalities.
            DataError: there are fewer items than folds.
        """
        self._require(samples)
        self._require_items(samples.items)
        with evaluating(model):
            sides = {modality: _encode(model, modality, samples, batch_size) for modality in self.between}
            protocols = {count: self._recalls(sides, count) for count in self.folds}
        first = sum(found[f"{a}_to_{b}_r@1"] for found in protocols.values() for a, b in self._directions)
        return {self.primary: first} | {
            f"{name}{self._suffix(count)}": value for count, found in protocols.items() for name, value in found.items()
        }

    @property
    def _directions(self) -> tuple[tuple[str, str], tuple[str, str]]:
        first, second = self.between
        return (first, second), (second, first)

    def _require(self, samples: Samples) -> None:
        missing = [modality for modality in self.between if modality not in samples.inputs]
        if missing:
            raise ConfigError(
                f"retrieval between {list(self.between)} needs '{missing[0]}', which samples with "
                f"{list(samples.modalities)} lack; give this party another task or that modality"
            )

    def _require_items(self, items: Int64[Tensor, " n"]) -> None:
        found, needed = len(set(items.tolist())), max(self.folds)
        if found < needed:
            raise DataError(f"{found} items cannot make {needed} folds; lower folds or test on more items")

    def _suffix(self, folds: int) -> str:
        return "" if len(self.folds) == 1 else "_full" if folds == 1 else f"_{folds}fold"

    def _recalls(self, sides: Mapping[str, _Side], folds: int) -> dict[str, float]:
        parts = self._split(sides[self.between[0]].items, folds)
        results = [self._fold({name: side.of(items) for name, side in sides.items()}) for items in parts]
        means = {name: fmean(result[name] for result in results) for name in results[0]}
        return means | {"folds": float(folds)}

    def _split(self, items: Int64[Tensor, " n"], folds: int) -> tuple[Int64[Tensor, " fold"], ...]:
        """Item numbers of each fold; sizes differ by one at most."""
        distinct: Tensor = items.unique()  # type: ignore[no-untyped-call]
        if self.fold_seed is not None:
            order = torch.randperm(len(distinct), generator=generator(self.fold_seed, "folds"))
            distinct = distinct[order.to(distinct.device)]
        return tuple(distinct.tensor_split(folds))

    def _fold(self, sides: Mapping[str, _Side]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for source, target in self._directions:
            queries, gallery = sides[source], sides[target]
            found = ranks(queries.values, gallery.values, queries.items, gallery.items)
            name = f"{source}_to_{target}"
            metrics |= {f"{name}_r@{cutoff}": recall for cutoff, recall in recall_at(found, self.cutoffs).items()}
            metrics[f"gallery_{target}"] = float(len(gallery.items))
            metrics[f"{name}_positives_per_query"] = positives_per_query(queries.items, gallery.items)
        return metrics


@dataclass(frozen=True)
class _Side:
    """Representations of one modality's distinct rows, and the item of each."""

    values: Float[Tensor, "n d"]
    items: Int64[Tensor, " n"]

    def of(self, items: Int64[Tensor, " k"]) -> _Side:
        """The rows of ``items``."""
        kept = torch.isin(self.items, items)
        return _Side(self.values[kept], self.items[kept])


def _encode(model: Embedder, modality: str, samples: Samples, batch_size: int) -> _Side:
    rows, place = samples.rows[modality].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    items = torch.empty_like(rows).scatter_(0, place, samples.items)
    load, device = samples.inputs[modality], model.device
    blocks = [model.represent(modality, load(part).to(device, non_blocking=True)) for part in rows.split(batch_size)]
    return _Side(torch.cat(blocks), items.to(device))
