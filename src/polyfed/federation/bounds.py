"""Bounds on what one client can do to an average, in terms of what the other clients of its kind do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import hypot, prod
from statistics import median
from typing import Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.core.settings import Settings
from polyfed.federation.client import ClientInfo

ENOUGH = 3
"""Clients from which on a median says what is usual: of fewer, one alone could move it."""

WHOLE, SIZE, SENT, ALONG = "", "=", "<", ">"
"""Keys, among those of tensors, of the whole update, of the new weights, of what was sent, and of how much of that is
left in the new weights: 1 where they have not moved along it, below 0 where they point away from it."""

OVERALL = (WHOLE, SIZE, SENT, ALONG)
"""Keys that are no tensors."""

_STATISTICS = ("running_mean", "running_var")  # torch's own names; their size is that of a client's data
_COUNTERS = "#"  # key of the usual step of counters, in all architectures
_ROOM = 4.0  # times the bound of other tensors that statistics have
_AT_REST = 0.25  # of what was sent: the usual update where most clients did not move and nothing else is known
_ELSEWHERE = 4.0  # room for what has no counterpart in models of other architectures, which move otherwise

Lengths = Mapping[str, float]
"""Name of a tensor -> L2 norm of its update; ``WHOLE``: of all floating ones together; ``SIZE``: of the new weights,
``SENT``: of what was sent; these three without statistics of batch normalisation."""

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a floating tensor -> its shape."""


class Bounds(Settings):
    """Bounds relative to the median of the clients of one kind, which a minority of them cannot move."""

    update: float | None = Field(
        default=4.0,
        ge=1,
        allow_inf_nan=False,
        description="longest update that counts as it is, in medians of the cohort, times the client's samples over "
        "their median where these are more; longer ones are scaled down; None: any",
    )
    refuse: float | None = Field(
        default=8.0,
        ge=1,
        allow_inf_nan=False,
        description="updates of more such medians are refused, their clients excluded from the round; None: none",
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
        description="samples that a client counts for at most in an average, in medians of its peers; None: all",
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
    """Client -> samples that it counts for in averages: as many as it joined with, at most ``times`` the usual."""
    usual_samples = _usual_samples(clients)
    return {
        client.id: client.samples
        if times is None or client.id not in usual_samples
        else min(client.samples, int(times * usual_samples[client.id]))
        for client in clients
    }


def reaches(clients: Sequence[ClientInfo], times: float | None) -> dict[str, float]:
    """Client -> how much longer than usual its updates may be: its samples over the usual, from 1 to ``times``.

    Who has more samples trains for more steps, and comes as much farther.
    """
    usual_samples = _usual_samples(clients)
    most = float("inf") if times is None else times
    return {
        client.id: min(max(client.samples / usual_samples.get(client.id, max(client.samples, 1)), 1.0), most)
        for client in clients
    }


def _usual_samples(clients: Sequence[ClientInfo]) -> dict[str, float]:
    """Client -> median samples of its peers: its architecture, else all that share a modality; of too few, nothing.

    Clients without samples are no part of it.
    """
    trained = [client for client in clients if client.samples > 0]
    medians: dict[tuple[str, tuple[str, ...]], float] = {}
    for client in {(one.architecture, one.modalities): one for one in clients}.values():
        own = [one.samples for one in trained if one.architecture == client.architecture]
        near = [one.samples for one in trained if set(one.modalities) & set(client.modalities)]
        peers = own if len(own) >= ENOUGH else near
        if len(peers) >= ENOUGH:
            medians[client.architecture, client.modalities] = median(peers)
    keys = {client.id: (client.architecture, client.modalities) for client in clients}
    return {client: medians[key] for client, key in keys.items() if key in medians}


@torch.no_grad()
def lengths(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Lengths:
    """How far tensors moved from ``old``; what has no counterpart there moved from 0.

    Raises:
        PayloadError: a tensor has another shape or type of numbers than its counterpart, or a counter fell.
    """
    found: dict[str, float] = {}
    moved: dict[str, Tensor] = {}
    sizes: list[Tensor] = []
    sent: list[Tensor] = []
    products: list[Tensor] = []
    for name, value in new.items():
        start = old.get(name)
        _require_alike(name, value, start)
        if value.is_floating_point():
            change = value.float() if start is None else value.float() - start.to(value.device).float()
            moved[name] = torch.linalg.vector_norm(change)
            if not name.endswith(_STATISTICS):
                sizes.append(torch.linalg.vector_norm(value.float()))
                if start is not None:
                    sent.append(torch.linalg.vector_norm(start.float()))
                    products.append((value.float() * start.to(value.device).float()).sum())
        else:
            found[name] = _counted_on(name, value, start)
    found |= dict(zip(moved, _listed(moved.values()), strict=True))
    if moved:
        found[WHOLE] = hypot(*(found[name] for name in moved if not name.endswith(_STATISTICS)))
        found[SIZE], found[SENT] = hypot(*_listed(sizes)), hypot(*_listed(sent))
        found[ALONG] = sum(_listed(products)) / found[SENT] ** 2 if found[SENT] else 1.0
    return found


def _listed(norms: Collection[Tensor]) -> list[float]:
    """Numbers, fetched from their device at once."""
    if not norms:
        return []
    device = next(iter(norms)).device
    listed: list[float] = torch.stack([norm.to(device) for norm in norms]).tolist()
    return listed


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
    names = dict.fromkeys(name for one in seen for name in one if name not in (SENT, ALONG))
    found = {name: median(one.get(name, 0.0) for one in seen) for name in names} if len(seen) >= ENOUGH else {}
    if not found.get(WHOLE):
        return {}
    total = sum(entries.values())
    floors = {name: found[WHOLE] * (count / total) ** 0.5 for name, count in entries.items()}
    return {name: max(value, floors.get(name, 0.0 if name in (WHOLE, SIZE) else 1.0)) for name, value in found.items()}


def usual_anywhere(seen: Sequence[tuple[Lengths, Shapes]]) -> dict[str, float]:
    """What updates of models of all architectures have in common; empty if there are too few, or most did not move.

    Tensors of one name and shape that enough of them have are compared as such, under ``labelled`` names. ``WHOLE`` is
    how far an entry moved, ``SENT`` how far the whole did for what was sent.
    """
    if len(seen) < ENOUGH:
        return {}
    entry = median(moved.get(WHOLE, 0.0) / max(_entries(shapes), 1) ** 0.5 for moved, shapes in seen)
    shares = [moved[WHOLE] / moved[SENT] for moved, _ in seen if moved.get(SENT)]
    if not entry:
        return {}
    alike: dict[str, list[float]] = {}
    for moved, shapes in seen:
        for name, shape in shapes.items():
            alike.setdefault(labelled(name, shape), []).append(moved[name])
    found = {label: median(values) for label, values in alike.items() if len(values) >= ENOUGH}
    steps = [max(own) for moved, shapes in seen if (own := [moved[name] for name in _counters(moved, shapes)])]
    if len(steps) >= ENOUGH:
        found[_COUNTERS] = max(median(steps), 1.0)
    return found | {WHOLE: entry, SENT: median(shares) if len(shares) >= ENOUGH else 0.0}


def from_anywhere(known: Mapping[str, float], moved: Lengths, shapes: Shapes, sent: Lengths) -> dict[str, float]:
    """What is usual for an update, by what updates of all architectures have in common.

    Args:
        known: see ``usual_anywhere``.
        moved: lengths of the update.
        shapes: of its floating tensors.
        sent: lengths of what it started from.
    """
    if not known:
        return {}
    counters = _counters(moved, shapes) if _COUNTERS in known else set()
    found = dict.fromkeys(counters, _ELSEWHERE * known.get(_COUNTERS, 0.0))
    for name, shape in shapes.items():
        entries = known[WHOLE] * prod(shape) ** 0.5
        there = known.get(labelled(name, shape))
        alone = _ELSEWHERE * max(entries, known[SENT] * sent.get(name, 0.0))
        found[name] = alone if there is None else max(there, entries)
    found[WHOLE] = hypot(*(found[name] for name in shapes if not name.endswith(_STATISTICS)))
    shared = {name for name, shape in shapes.items() if labelled(name, shape) in known}
    return {name: value for name, value in found.items() if name not in shapes or name in shared}  # others as a whole


def within_anywhere(own: Mapping[str, float], known: Mapping[str, float], shapes: Shapes) -> dict[str, float]:
    """What is usual in one architecture, where it has tensors in common with others within what is usual in all.

    So clients who are alone with their architecture do not say for themselves what is usual for all.
    """
    found = dict(own)
    for name, shape in shapes.items():
        if name in own and (there := known.get(labelled(name, shape))) is not None:
            entries = known[WHOLE] * prod(shape) ** 0.5
            found[name] = min(own[name], _ELSEWHERE * max(there, entries))
    return found


def at_rest(moved: Lengths, shapes: Shapes, sent: Lengths) -> dict[str, float]:
    """What passes for usual where most clients did not move: a part of what was sent."""
    total = sent.get(WHOLE, 0.0) * _AT_REST
    if not total:
        return {}
    found = {name: 1.0 for name in moved if name not in shapes}
    entry = total / max(_entries(shapes), 1) ** 0.5
    found |= {name: max(sent.get(name, 0.0) * _AT_REST, entry * prod(shape) ** 0.5) for name, shape in shapes.items()}
    return {name: value for name, value in found.items() if name not in (SIZE, SENT, ALONG)} | {WHOLE: total}


def labelled(name: str, shape: tuple[int, ...]) -> str:
    """A tensor's name with its shape."""
    return f"{name}{list(shape)}"


def _counters(moved: Lengths, shapes: Shapes) -> set[str]:
    return set(moved) - set(shapes) - set(OVERALL)


def _entries(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def times(moved: Lengths, known: Mapping[str, float], name: str) -> float:
    """How many times the usual a length is; 0 where nothing is known to be usual."""
    return moved.get(name, 0.0) / known[name] if known.get(name) else 0.0


def room(name: str) -> float:
    """Times the bound of other tensors that a tensor has: statistics of batch normalisation are as a client's data."""
    return _ROOM if name.endswith(_STATISTICS) else 1.0


def excess(moved: Lengths, known: Mapping[str, float]) -> tuple[float, str]:
    """How many times the usual an update is, and which tensor is farthest beyond it (``WHOLE``: all together)."""
    ratios = {
        name: times(moved, known, name) / room(name)
        for name in moved
        if name in known and name not in (SIZE, SENT, ALONG)
    }
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
    bound = most * room(name) * known.get(name, float("inf"))
    return 1.0 if moved.get(name, 0.0) <= bound else bound / moved[name]


def _towards(start: Tensor, value: Tensor, share: float) -> Tensor:
    if value.is_floating_point():
        return torch.lerp(start, value, share)
    return start + ((value.double() - start.double()) * share).floor().to(value.dtype)
