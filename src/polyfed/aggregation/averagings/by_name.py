"""Averages of updates over all who have a tensor, whatever else they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from polyfed.aggregation.averaging import Averaging, require_one_frozen
from polyfed.aggregation.mean import GlobalModel, Update, WeightedMean
from polyfed.optim.servers import Models


class ByName(Averaging):
    """w <- sum_k n_k w_k / sum_k n_k over the clients whose models have a tensor of that name and shape.

    So clients of other classes, whose models are of other types, learn prompts and adapters together.
    """

    short_name: ClassVar[str] = "by_name"
    between_types = True

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        if self.mean != "exact":
            raise ValueError("mean: sequential goes through clients of one type; leave it at exact, or choose by_type")
        return self

    def average(
        self,
        weights: Models,
        models: Mapping[str, GlobalModel],
        updates: Iterable[Update],
        asked: Mapping[str, float],
    ) -> dict[str, dict[str, Tensor]]:
        mean, counted = WeightedMean(), 0.0
        for _, tensors, samples in updates:
            if samples > 0:
                counted += samples
                mean.add({_key(name, value): value for name, value in tensors.items()}, samples)
            del tensors  # before the next come
        means = mean.take() if counted else {}
        return {
            kind: {name: means.get(_key(name, value), value) for name, value in old.items()}
            for kind, old in weights.items()
        }

    def require(self, models: Mapping[str, GlobalModel]) -> None:
        require_one_frozen(models)


def _key(name: str, value: Tensor) -> str:
    return f"{name} {tuple(value.shape)}"
