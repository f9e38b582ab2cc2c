"""Bounds on what one client can do to an average, in terms of what the other clients of its kind do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.settings import Settings

ENOUGH = 3
"""Clients from which on a median says what is usual: of fewer, one alone could move it."""

WHOLE, SIZE = "", "="
"""Keys, among those of tensors, of the whole update and of the weights themselves."""

_STATISTICS = ("running_mean", "running_var")  # torch's own names; their size is that of a client's data

Lengths = Mapping[str, float]
"""Name of a tensor -> L2 norm of its update; ``WHOLE``: of all floating ones together; ``SIZE``: of the new weights,
without statistics of batch normalisation."""


class Bounds(Settings):
    """Bounds relative to the median of the clients of one kind, which a minority of them cannot move."""

    update: float | None = Field(
        default=4.0,
        ge=1,
        allow_inf_nan=False,
        description="longest update that counts as it is, in medians of the cohort; longer ones are scaled down; "
        "None: any",
    )
    refuse: float | None = Field(
        default=8.0,
        ge=1,
        allow_inf_nan=False,
        description="updates of more medians are refused, and their clients excluded from the round; None: none",
    )
    size: float | None = Field(
        default=2.0,
        ge=1,
        allow_inf_nan=False,
        description="weights whose norm is more medians of the cohort's are refused as well; None: none",
    )
    weight: float | None = Field(
        default=6.0,
        ge=1,
        allow_inf_nan=False,
        description="samples that a client counts for at most in an average, in medians of the federation; None: all",
    )
    waiting: int = Field(
        default=1 << 30, ge=0, description="bytes of replies that wait in memory for a median; more wait in files"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.update is not None and self.refuse is not None and self.refuse < self.update:
            raise ValueError(f"refuse is {self.refuse:g}, below update ({self.update:g}); set it to that or more")
        return self

    @property
    def bind(self) -> bool:
        """Whether updates are bounded at all."""
        return any(bound is not None for bound in (self.update, self.refuse, self.size))


def counted(clients: Sequence[ClientInfo], times: float | None) -> dict[str, int]:
    """Client -> samples that it counts for in averages: as many as it joined with, at most ``times`` the median.

    The median is that of the clients of one architecture, or of the whole federation where these are fewer than
    ``ENOUGH``. Clients without samples are no part of it, and of fewer than ``ENOUGH`` clients nobody is capped.
    """
    everybody = [client.samples for client in clients if client.samples > 0]
    alike: dict[str, list[int]] = {}
    for client in clients:
        if client.samples > 0:
            alike.setdefault(client.architecture, []).append(client.samples)
    found = {}
    for client in clients:
        own = alike.get(client.architecture, [])
        sizes = own if len(own) >= ENOUGH else everybody
        bounded = times is not None and len(sizes) >= ENOUGH
        found[client.id] = min(client.samples, int((times or 0) * median(sizes))) if bounded else client.samples
    return found


@torch.no_grad()
def lengths(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Lengths:
    """How far tensors moved from ``old``; what has no counterpart there moved from 0.

    Raises:
        PayloadError: a tensor has another shape or type of numbers than its counterpart, or a counter fell.
    """
    found: dict[str, float] = {}
    moved: dict[str, Tensor] = {}
    sizes: list[Tensor] = []
    for name, value in new.items():
        start = old.get(name)
        _require_alike(name, value, start)
        if value.is_floating_point():
            change = value.float() if start is None else value.float() - start.to(value.device).float()
            moved[name] = torch.linalg.vector_norm(change)
            if not name.endswith(_STATISTICS):
                sizes.append(torch.linalg.vector_norm(value.float()))
        else:
            found[name] = _counted_on(name, value, start)
    if moved:
        device = next(iter(moved.values())).device
        norms = torch.stack([norm.to(device) for norm in moved.values()])
        found |= dict(zip(moved, norms.tolist(), strict=True))
        found[WHOLE] = float(torch.linalg.vector_norm(norms))
        found[SIZE] = float(torch.stack(sizes).norm()) if sizes else 0.0
    return found


def _require_alike(name: str, value: Tensor, start: Tensor | None) -> None:
    if start is not None and (value.dtype, value.shape) != (start.dtype, start.shape):
        raise PayloadError(
            f"tensor '{name}' is {_kind(value)}, sent was {_kind(start)}: types of numbers and shapes are the server's"
        )


def _counted_on(name: str, value: Tensor, start: Tensor | None) -> float:
    """Largest step of whole numbers, which training only ever counts up."""
    change = value.double() if start is None else value.double() - start.to(value.device).double()
    if start is not None and change.numel() and float(change.min()) < 0:
        raise PayloadError(f"tensor '{name}' of whole numbers fell by {-float(change.min()):g}, which no training does")
    return float(change.abs().max()) if change.numel() else 0.0


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def usual(seen: Sequence[Lengths], entries: Mapping[str, int]) -> dict[str, float]:
    """What updates of these lengths have in common: medians; empty if there are too few, or most did not move.

    A tensor that most clients hardly move may still move as far, entry by entry, as the usual update moves on average;
    a counter by one.

    Args:
        seen: lengths of one update each.
        entries: floating tensor -> its number of entries.
    """
    names = dict.fromkeys(name for one in seen for name in one)
    found = {name: median(one.get(name, 0.0) for one in seen) for name in names} if len(seen) >= ENOUGH else {}
    if not found.get(WHOLE):
        return {}
    total = sum(entries.values())
    floors = {name: found[WHOLE] * (count / total) ** 0.5 for name, count in entries.items()}
    return {name: max(value, floors.get(name, 0.0 if name in (WHOLE, SIZE) else 1.0)) for name, value in found.items()}


def times(moved: Lengths, known: Mapping[str, float], name: str) -> float:
    """How many times the usual a length is; 0 where nothing is known to be usual."""
    return moved.get(name, 0.0) / known[name] if known.get(name) else 0.0


def excess(moved: Lengths, known: Mapping[str, float]) -> tuple[float, str]:
    """How many times the usual an update is, and which tensor is farthest beyond it (``WHOLE``: all together)."""
    ratios = {name: times(moved, known, name) for name in moved if name in known and name != SIZE}
    worst = max(ratios, key=lambda name: ratios[name], default=WHOLE)
    return ratios.get(worst, 0.0), worst


@torch.no_grad()
def shortened(
    new: Mapping[str, Tensor], old: Mapping[str, Tensor], moved: Lengths, known: Mapping[str, float], most: float
) -> dict[str, Tensor]:
    """The update scaled down until it is, as a whole and in each tensor, at most ``most`` times the usual.

    Tensors within the bound stay as they are, bit for bit, if the whole is.
    """
    every = _share(WHOLE, moved, known, most)
    found = {}
    for name, value in new.items():
        share = _share(name, moved, known, most)
        share = min(every, share) if value.is_floating_point() else share
        start = old[name].to(value.device) if name in old else torch.zeros_like(value)
        found[name] = value if share == 1.0 else _towards(start, value, share)
    return found


def _share(name: str, moved: Lengths, known: Mapping[str, float], most: float) -> float:
    bound = most * known.get(name, float("inf"))
    return 1.0 if moved.get(name, 0.0) <= bound else bound / moved[name]


def _towards(start: Tensor, value: Tensor, share: float) -> Tensor:
    if value.is_floating_point():
        return torch.lerp(start, value, share)
    return start + ((value.double() - start.double()) * share).floor().to(value.dtype)
