"""Weighted means of named tensors, and of models of several types, folded one client at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.models.slots import Slot, TensorPlaces
from polyfed.optim.servers import Models


class WeightedMean:
    """Running sum_c n_c w_c / sum_c n_c (McMahan et al. 2017), name by name, in memory of one model.

    The running form mean += n / N (w - mean) is the exact mean, not the sequential interpolation of some
    released servers; equal inputs come out bit for bit. A client counts only for the names that it has, so
    clients of different architectures share what they have in common. Floating tensors accumulate in their
    own precision, 16-bit ones in fp32; integer and boolean ones (``num_batches_tracked``) in fp64, and their
    mean is rounded.

    >>> mean = WeightedMean()
    >>> mean.add({"w": torch.tensor([0.0])}, weight=1)
    >>> mean.add({"w": torch.tensor([4.0])}, weight=3)
    >>> mean.result()
    {'w': tensor([3.])}
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._total = 0.0

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Fold the next client in; its tensors are not kept.

        Args:
            tensors: by name.
            weight: its share, such as its number of examples; with 0 it does not count.

        Raises:
            PayloadError: the weight is negative or not finite, or a tensor's shape differs from earlier
                clients'; nothing of this client is added then.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise PayloadError(f"weight of a client is {weight}; it must be finite and not negative")
        for name, tensor in tensors.items():  # all of them first: a client counts as a whole or not at all
            entry = self._entries.get(name)
            if entry is not None and entry.mean.shape != tensor.shape:
                raise PayloadError(
                    f"tensor '{name}' has shape {tuple(tensor.shape)}, not {tuple(entry.mean.shape)} as in "
                    "earlier clients; average only clients that share this layer's architecture"
                )
        self._total += weight
        for name, tensor in tensors.items() if weight > 0 else ():
            entry = self._entries.get(name)
            if entry is None:
                mean = tensor.detach().to(accumulator(tensor.dtype), copy=True)
                self._entries[name] = _Entry(mean, weight, tensor.dtype)
            else:
                entry.total += weight
                # the mean so far, not a sum to be divided at the end, which would grow with the number of samples
                entry.mean.lerp_(tensor.detach().to(entry.mean), weight / entry.total)

    def result(self) -> dict[str, Tensor]:
        """The means, in the type and on the device of the first client's tensors; none if no client had tensors.

        Raises:
            PayloadError: no client with a positive weight was added.
        """
        return self._values(copy=True)

    def take(self) -> dict[str, Tensor]:
        """``result`` without copies where none is needed, emptying the mean: for models that fill the memory.

        Raises:
            PayloadError: as ``result``.
        """
        values = self._values(copy=False)
        self._entries, self._total = {}, 0.0
        return values

    def _values(self, *, copy: bool) -> dict[str, Tensor]:
        if not self._total:
            raise PayloadError("no client contributed a positive weight; there is no mean of nothing")
        values = {}
        for name, entry in self._entries.items():
            rounded = entry.mean if entry.dtype.is_floating_point else entry.mean.round()
            values[name] = rounded.to(entry.dtype, copy=copy)
        return values


@dataclass
class _Entry:
    mean: Tensor
    total: float
    dtype: torch.dtype


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which tensors of a type are summed: fp32 at least, and fp64 for integers."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64


@dataclass(frozen=True)
class GlobalModel:
    """What aggregation knows of the global model of a type of clients.

    Attributes:
        modalities: that the type's clients have.
        places: of its tensors.
        shapes: of its tensors.
        clients: ids of the type's clients, for messages.
    """

    modalities: tuple[str, ...]
    places: TensorPlaces
    shapes: Mapping[str, tuple[int, ...]]
    clients: tuple[str, ...] = ()

    @property
    def some_clients(self) -> str:
        """Ids of a few of the type's clients."""
        return ", ".join(self.clients[:3]) + (f" and {len(self.clients) - 3} more" if len(self.clients) > 3 else "")

    @cached_property
    def keys(self) -> Mapping[Slot, Mapping[str, str]]:
        """Slot -> key -> name of the tensor."""
        keys: dict[Slot, dict[str, str]] = {}
        for name, place in self.places.items():
            keys.setdefault(place.slot, {})[place.key] = name
        return keys


@dataclass(frozen=True)
class Contribution:
    """A share of a type's update of one of its slots."""

    source: str
    slot: Slot
    coefficient: float


Rule = Mapping[tuple[str, Slot], tuple[Contribution, ...]]
"""(type, slot) -> what its global model takes; nothing means that it stays as it is."""

Update = tuple[str, Mapping[str, Tensor], float]
"""A client's type, the weights that it has trained, and on how many samples."""


def exact_average(
    weights: Models,
    models: Mapping[str, GlobalModel],
    rule_of: Callable[[Mapping[str, float]], Rule],
    updates: Iterable[Update],
) -> dict[str, dict[str, Tensor]]:
    """Means of each type, then W <- W + sum of coefficient x (mean - W) as the rule says (FedCola, Eq. 3).

    The order of the clients of a type does not matter (up to rounding). Memory: the global models and one mean of
    each, whatever the number of clients. Integer tensors (counters) are the rounded mean of the type's own.

    Args:
        weights: type -> its global model at the start of the round.
        models: type -> what its global model consists of.
        rule_of: samples by type -> rule; shares between types need sizes, which are known only at the end.
        updates: one by one; none is kept.
    """
    means, sizes = _means(weights, updates)
    rule = rule_of(sizes)
    return {
        kind: {
            name: _moved(weights, means, models, rule[kind, place.slot], kind, name)
            for name, place in model.places.items()
        }
        for kind, model in models.items()
    }


def _means(kinds: Iterable[str], updates: Iterable[Update]) -> tuple[Models, dict[str, float]]:
    """Mean of each type that has samples, and samples of each type."""
    running = {kind: WeightedMean() for kind in kinds}
    sizes = dict.fromkeys(running, 0.0)
    # never under no_grad: clients may train while their updates are iterated
    for kind, tensors, samples in updates:
        running[kind].add(tensors, samples)
        sizes[kind] += samples
        del tensors  # before the next come
    return {kind: mean.take() for kind, mean in running.items() if sizes[kind] > 0}, sizes


@torch.no_grad()
def _moved(
    weights: Models,
    means: Models,
    models: Mapping[str, GlobalModel],
    shares: tuple[Contribution, ...],
    kind: str,
    name: str,
) -> Tensor:
    old, place = weights[kind][name], models[kind].places[name]
    if not shares:  # the very tensor: server optimisers leave alone what nobody has moved
        return old
    if shares == (Contribution(kind, place.slot, 1.0),) or not old.is_floating_point():
        return means[kind][name] if kind in means else old
    # shares need not add up to one, so that the old model is moved by differences and not replaced by a mean
    total = old.to(accumulator(old.dtype), copy=True)
    for share in shares:
        # the same tensor under the name that the other type has for it
        source = models[share.source].keys[share.slot][place.key]
        total.add_(means[share.source][source].to(total), alpha=share.coefficient)
        total.sub_(weights[share.source][source].to(total), alpha=share.coefficient)
    return total.to(old.dtype)


def sequential_mean(
    weights: Models, updates: Iterable[Update], asked: Mapping[str, float]
) -> dict[str, dict[str, Tensor]]:
    """W <- W + n_k / n (W_k - W) for one client after the other; see ``sequential_average``."""
    running: dict[str, dict[str, Tensor]] = {}
    for kind, tensors, samples in updates:
        if asked.get(kind, 0) > 0:
            running.setdefault(kind, {name: value.clone() for name, value in weights[kind].items()})
            for name, value in running[kind].items():
                _move(value, tensors[name], samples / asked[kind])
        del tensors  # before the next come
    return {kind: running.get(kind, dict(old)) for kind, old in weights.items()}


def sequential_average(
    weights: Models,
    models: Mapping[str, GlobalModel],
    rule: Rule,
    updates: Iterable[Update],
    asked: Mapping[str, float],
) -> dict[str, dict[str, Tensor]]:
    """W <- W + c (W_k - W) for one client after the other, as the released code of FedCola and its relatives does.

    This is not the weighted mean: early clients count less than late ones, a share of the old model stays, and the
    result depends on the order of the clients. For comparison with published numbers only. The rule, and a client's
    share of its type, are of the samples of all clients that are ``asked``, by type.
    """
    running = {kind: {name: value.clone() for name, value in model.items()} for kind, model in weights.items()}
    moved: set[tuple[str, Slot]] = set()
    for update in updates:
        moved |= interpolate(running, models, rule, asked, update)
        del update  # before the next comes
    return {
        kind: {
            name: (running if (kind, place.slot) in moved else weights)[kind][name]
            for name, place in model.places.items()
        }
        for kind, model in models.items()
    }


def interpolate(
    running: Models, models: Mapping[str, GlobalModel], rule: Rule, asked: Mapping[str, float], update: Update
) -> set[tuple[str, Slot]]:
    """Move the running models towards one client's, in place; the types and slots that it has a share in."""
    kind, tensors, samples = update
    moved = set()
    for (target, slot), shares in rule.items():
        for share in (share for share in shares if share.source == kind):
            moved.add((target, slot))  # even by 0: a client came, so that momenta may follow
            share_of_client = share.coefficient * samples / asked[kind]
            for key, name in models[target].keys[slot].items():
                _move(running[target][name], tensors[models[kind].keys[share.slot][key]], share_of_client)
    return moved


@torch.no_grad()
def _move(running: Tensor, towards: Tensor, share: float) -> None:
    if running.is_floating_point():
        running.lerp_(towards.to(running), share)
    else:
        # counters have no lerp, and in fp32 would lose their last digits
        running.copy_(running.double().lerp(towards.to(running.device).double(), share).round())
