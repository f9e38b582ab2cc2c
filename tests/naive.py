"""Plain Python that formulas are tested against, and a watch on how much memory an operation takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyfed.aggregation.averaging import Averages, Averaging, GlobalModel, ModelsByType

Vector = Sequence[float]


def global_models(weights: Mapping[str, Mapping[str, Tensor]]) -> dict[str, GlobalModel]:
    """Type -> its global model, of which no more than the weights matters."""
    return {name: GlobalModel(tensors, {}, ()) for name, tensors in weights.items()}


def dot(a: Vector, b: Vector) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit_vector(a: Vector) -> list[float]:
    return [x / math.sqrt(dot(a, a)) for x in a]


def cosine(a: Vector, b: Vector) -> float:
    return dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))


def softmax(row: Iterable[float]) -> list[float]:
    row = list(row)
    top = max(row)
    powers = [math.exp(x - top) for x in row]
    return [p / sum(powers) for p in powers]


def kl(teacher: Iterable[float], student: Iterable[float], tau: float = 1.0) -> float:
    """KL(softmax(teacher / tau) || softmax(student / tau))."""
    p, q = (softmax([x / tau for x in row]) for row in (teacher, student))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns, and bytes of new ones in all."""

    elements = made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
                self.made += 0 if _address(value) in known else value.nbytes
        return out


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def averaged(
    averaging: Averaging,
    models: ModelsByType,
    updates: Iterable[tuple[str, Mapping[str, Tensor], float]],
    asked: Mapping[str, float] | None = None,
) -> Averages:
    """New global models from the updates of clients, as FedAvg averages."""
    means = averaging.new_means(models, asked or {})
    for type_name, weights, samples in updates:
        means[type_name].add(weights, samples)
    return averaging.average(models, means)
