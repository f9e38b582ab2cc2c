"""Norms of updates, and updates scaled down to a norm (norm clipping)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import hypot
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError

WHOLE, SIZE, SENT, ALONG = "", "=", "<", ">"
"""Keys, among those of tensors, of the whole update, of the new weights, of what was sent, and of how much of that is
left in the new weights: 1 where they have not moved along it, below 0 where they point away from it."""

OVERALL = (WHOLE, SIZE, SENT, ALONG)
"""Keys that are no tensors."""

Norms = Mapping[str, float]
"""Name of a tensor -> L2 norm of its update, of a counter its largest step; and the keys of ``OVERALL``, in which
statistics of batch normalisation do not count."""

_STATISTICS = ("running_mean", "running_var")  # torch's own names; their size is that of a client's data
_STATISTICS_ROOM = 4.0  # times the bound of other tensors that statistics have


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running statistic of batch normalisation, by its name."""
    return name.endswith(_STATISTICS)


def room(name: str) -> float:
    """Times the bound of other tensors that a tensor has: statistics are as a client's data are."""
    return _STATISTICS_ROOM if is_statistic(name) else 1.0


class _Measured(NamedTuple):
    """One floating tensor of an update, as 0-d tensors on its device.

    Attributes:
        moved: norm of the change.
        size: norm of the new value.
        sent: norm of what was sent, if it was.
        product: inner product of both, likewise.
    """

    moved: Tensor
    size: Tensor
    sent: Tensor | None
    product: Tensor | None


@torch.no_grad()
def update_norms(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Norms:
    """How far tensors moved from ``old``; what has no counterpart there moved from 0.

    Raises:
        PayloadError: a tensor has another shape or type of numbers than its counterpart, or a counter fell.
    """
    steps: dict[str, float] = {}
    floating: dict[str, _Measured] = {}
    for name, value in new.items():
        start = old.get(name)
        _require_same_type(name, value, start)
        if value.is_floating_point():
            floating[name] = _measure(value.float(), start)
        else:
            steps[name] = _largest_step(name, value, start)
    if not floating:
        return steps
    moved = dict(zip(floating, _numbers([one.moved for one in floating.values()]), strict=True))
    return steps | moved | _overall(moved, [one for name, one in floating.items() if not is_statistic(name)])


def _measure(value: Tensor, start: Tensor | None) -> _Measured:
    size = torch.linalg.vector_norm(value)
    if start is None:
        return _Measured(size, size, None, None)
    sent = torch.linalg.vector_norm(start.float())  # where it was sent from, before it moves to the reply's device
    before = start.to(value.device).float()
    return _Measured(torch.linalg.vector_norm(value - before), size, sent, (value * before).sum())


def _overall(moved: Norms, weights: Collection[_Measured]) -> dict[str, float]:
    """Norms of all weights together; statistics are not among them."""
    sent = hypot(*_numbers([one.sent for one in weights if one.sent is not None]))
    products = _numbers([one.product for one in weights if one.product is not None])
    return {
        WHOLE: hypot(*(norm for name, norm in moved.items() if not is_statistic(name))),
        SIZE: hypot(*_numbers([one.size for one in weights])),
        SENT: sent,
        ALONG: sum(products) / sent**2 if sent else 1.0,
    }


def _numbers(scalars: Collection[Tensor]) -> list[float]:
    """Numbers of 0-d tensors, fetched from their device at once."""
    if not scalars:
        return []
    device = next(iter(scalars)).device
    numbers: list[float] = torch.stack([scalar.to(device) for scalar in scalars]).tolist()
    return numbers


def _require_same_type(name: str, value: Tensor, start: Tensor | None) -> None:
    if start is not None and (value.dtype, value.shape) != (start.dtype, start.shape):
        raise PayloadError(
            f"tensor '{name}' is {_type(value)}, sent was {_type(start)}: types of numbers and shapes are the server's"
        )


def _type(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _largest_step(name: str, value: Tensor, start: Tensor | None) -> float:
    """Largest step of whole numbers, which training only ever counts up."""
    change = value.double() if start is None else value.double() - start.to(value.device).double()
    if start is not None and change.numel() and float(change.min()) < 0:
        raise PayloadError(f"tensor '{name}' of whole numbers fell by {-float(change.min()):g}, which no training does")
    return float(change.abs().max()) if change.numel() else 0.0


def times_median(norms: Norms, medians: Norms, name: str) -> float:
    """How many medians a norm is; 0 where there is no median."""
    return norms.get(name, 0.0) / medians[name] if medians.get(name) else 0.0


def excess(norms: Norms, medians: Norms) -> tuple[float, str]:
    """How many medians an update is, and which tensor is farthest beyond its own (``WHOLE``: all together)."""
    ratios = {
        name: times_median(norms, medians, name) / room(name)
        for name in norms
        if name in medians and name not in (SIZE, SENT, ALONG)
    }
    worst = max(ratios, key=lambda name: ratios[name], default=WHOLE)
    return ratios.get(worst, 0.0), worst


@torch.no_grad()
def clipped(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], norms: Norms, medians: Norms, most: float
) -> dict[str, Tensor]:
    """The update scaled down until it is, as a whole and in each tensor, at most ``most`` medians long.

    Tensors within the bound stay as they are, bit for bit, if the whole is.

    Args:
        new: weights [any shape] by name.
        old: what they started from; 0 where a name is missing.
        norms: of the update, as ``update_norms`` gives them.
        medians: norm of the median update, by the same names.
        most: medians.
    """
    overall = _scale(WHOLE, norms, medians, most)
    result = {}
    for name, value in new.items():
        scale = _scale(name, norms, medians, most)
        scale = min(overall, scale) if value.is_floating_point() else scale
        start = old[name].to(value.device) if name in old else torch.zeros_like(value)
        result[name] = value if scale == 1.0 else _towards(start, value, scale)
    return result


def _scale(name: str, norms: Norms, medians: Norms, most: float) -> float:
    bound = most * room(name) * medians.get(name, float("inf"))
    return 1.0 if norms.get(name, 0.0) <= bound else bound / norms[name]


def _towards(start: Tensor, value: Tensor, share: float) -> Tensor:
    if value.is_floating_point():
        return torch.lerp(start, value, share)
    return start + ((value.double() - start.double()) * share).floor().to(value.dtype)
