"""Averages of updates within each type of clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from torch import Tensor

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.mean import GlobalModel, Update, WeightedMean, sequential_mean
from polyfed.optim.servers import Models


class ByType(Averaging):
    """w <- sum_k n_k w_k / sum_k n_k over the clients of each type (McMahan et al. 2017, Algorithm 1).

    Types exchange nothing.
    """

    short_name: ClassVar[str] = "by_type"

    def average(
        self,
        weights: Models,
        models: Mapping[str, GlobalModel],
        updates: Iterable[Update],
        asked: Mapping[str, float],
    ) -> dict[str, dict[str, Tensor]]:
        if self.mean == "sequential":
            return sequential_mean(weights, updates, asked)
        means, sizes = {kind: WeightedMean() for kind in weights}, dict.fromkeys(weights, 0.0)
        # never under no_grad: clients may train while their updates are iterated
        for kind, tensors, samples in updates:
            means[kind].add(tensors, samples)
            sizes[kind] += samples
            del tensors  # before the next come
        averages = {}
        for kind, old in weights.items():
            mean = means[kind].take() if sizes[kind] > 0 else old
            averages[kind] = {name: mean[name] for name in old}
        return averages
