"""Weighted means of named tensors, folded one client at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.wire.payload import grouped


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
        self.total = 0.0
        """Weights of the clients so far."""

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Fold the next client in; its tensors are not kept.

        Args:
            tensors: tensors of the client by name.
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
        self.total += weight
        alike: dict[tuple[float, torch.dtype, torch.device], dict[str, Tensor]] = {}
        for name, tensor in tensors.items() if weight > 0 else ():
            entry = self._entries.get(name)
            if entry is None:
                mean = tensor.to(accumulator(tensor.dtype), copy=True)
                self._entries[name] = _Entry(mean, weight, tensor.dtype)
            else:
                entry.total += weight
                alike.setdefault((entry.total, entry.mean.dtype, entry.mean.device), {})[name] = tensor
        for (total, *form), known in alike.items():
            for names in grouped(known):
                means, values = [self._entries[name].mean for name in names], [known[name] for name in names]
                if form != [values[0].dtype, values[0].device]:
                    torch._foreach_copy_(converted := torch._foreach_clone(means), values)
                    values = [*converted]
                # the mean so far, not a sum to be divided at the end, which would grow with the number of samples
                torch._foreach_lerp_(means, values, weight / total)

    def result(self) -> dict[str, Tensor]:
        """The means, in the type and on the device of the first client's tensors; none if no client had tensors.

        Raises:
            PayloadError: no client with a positive weight was added.
        """
        return self._values(copy=True)

    def take(self) -> dict[str, Tensor]:
        """``result`` without copies where none is needed, emptying the mean: for models that fill the memory.

        Raises:
            PayloadError: no client with a positive weight was added.
        """
        values = self._values(copy=False)
        self._entries, self.total = {}, 0.0
        return values

    def _values(self, *, copy: bool) -> dict[str, Tensor]:
        if not self.total:
            raise PayloadError("no client contributed a positive weight; an empty set of replies cannot be averaged")
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


@cache
def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which tensors of a type are summed: fp32 at least, and fp64 for integers.

    >>> accumulator(torch.bfloat16), accumulator(torch.int64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64
