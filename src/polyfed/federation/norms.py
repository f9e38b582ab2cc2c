"""Norms of updates, their medians in a cohort, and updates scaled down to a norm (norm clipping)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from math import hypot, prod
from statistics import median

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.federation.bounds import ENOUGH

WHOLE, SIZE, SENT, ALONG = "", "=", "<", ">"
"""Keys, among those of tensors, of the whole update, of the new weights, of what was sent, and of how much of that is
left in the new weights: 1 where they have not moved along it, below 0 where they point away from it."""

OVERALL = (WHOLE, SIZE, SENT, ALONG)
"""Keys that are no tensors."""

Norms = Mapping[str, float]
"""Name of a tensor -> L2 norm of its update, of a counter its largest step; and the keys of ``OVERALL``, in which
statistics of batch normalisation do not count."""

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a floating tensor -> its shape."""

_STATISTICS = ("running_mean", "running_var")  # torch's own names; their size is that of a client's data
_STATISTICS_ROOM = 4.0  # times the bound of other tensors that statistics have
_COUNTERS = "#"  # key of the median step of counters, in all architectures
_AT_REST = 0.25  # of what was sent: stands for the median where most clients did not move and nothing else is known
_ELSEWHERE = 4.0  # room for what has no counterpart in models of other architectures, which move otherwise


@torch.no_grad()
def update_norms(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> Norms:
    """How far tensors moved from ``old``; what has no counterpart there moved from 0.

    Raises:
        PayloadError: a tensor has another shape or type of numbers than its counterpart, or a counter fell.
    """
    steps: dict[str, float] = {}
    floating: dict[str, Tensor] = {}
    for name, value in new.items():
        start = old.get(name)
        _require_same_type(name, value, start)
        if value.is_floating_point():
            floating[name] = value.float()  # squares of float16 overflow from 256 on
        else:
            steps[name] = _largest_step(name, value, start)
    return steps | _norms(floating, old) if floating else steps


def _norms(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, float]:
    """Norms of fp32 tensors, and of all weights together; statistics are not among these."""
    known = {name: old[name].to(value.device).float() for name, value in new.items() if name in old}
    changes = [value - known[name] if name in known else value for name, value in new.items()]
    weights = {name: value for name, value in new.items() if not _is_statistic(name)}
    sent = {name: known[name] for name in weights if name in known}
    lengths = iter(_lengths([*changes, *weights.values(), *sent.values()]))
    moved = dict(zip(new, islice(lengths, len(new)), strict=True))
    totals = {WHOLE: hypot(*(moved[name] for name in weights)), SIZE: hypot(*islice(lengths, len(weights)))}
    return moved | totals | _beside(weights, sent, hypot(*lengths))


def _beside(new: Mapping[str, Tensor], sent: Mapping[str, Tensor], length: float) -> dict[str, float]:
    if not length:
        return {SENT: length, ALONG: 1.0}
    products: list[float] = torch.stack([(new[name] * before).sum() for name, before in sent.items()]).tolist()
    return {SENT: length, ALONG: sum(products) / length**2}


def _require_same_type(name: str, value: Tensor, start: Tensor | None) -> None:
    if start is not None and (value.dtype, value.shape) != (start.dtype, start.shape):
        types = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in (value, start)]
        raise PayloadError(
            f"tensor '{name}' is {types[0]}, sent was {types[1]}: types of numbers and shapes are the server's"
        )


def _lengths(tensors: list[Tensor]) -> list[float]:
    """L2 norms of floating tensors of one device, fetched from it at once."""
    found: list[float] = torch.stack(torch._foreach_norm(tensors)).tolist() if tensors else []
    return found


def _largest_step(name: str, value: Tensor, start: Tensor | None) -> float:
    """Largest step of whole numbers, which training only ever counts up."""
    change = value.double() if start is None else value.double() - start.to(value.device).double()
    if start is not None and change.numel() and float(change.min()) < 0:
        raise PayloadError(f"tensor '{name}' of whole numbers fell by {-float(change.min()):g}, which no training does")
    return float(change.abs().max()) if change.numel() else 0.0


def _is_statistic(name: str) -> bool:
    return name.endswith(_STATISTICS)


def _room(name: str) -> float:
    return _STATISTICS_ROOM if _is_statistic(name) else 1.0


# ---- against medians


def times_median(norms: Norms, medians: Norms, name: str) -> float:
    """How many medians a norm is; 0 where there is no median."""
    return norms.get(name, 0.0) / medians[name] if medians.get(name) else 0.0


def excess(norms: Norms, medians: Norms) -> tuple[float, str]:
    """How many medians an update is, and which tensor is farthest beyond its own (``WHOLE``: all together)."""
    ratios = {
        name: times_median(norms, medians, name) / _room(name)
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

    def scale_of(name: str) -> float:
        bound = most * _room(name) * medians.get(name, float("inf"))
        return 1.0 if norms.get(name, 0.0) <= bound else bound / norms[name]

    overall, result = scale_of(WHOLE), {}
    for name, value in new.items():
        is_floating = value.is_floating_point()
        scale = min(overall, scale_of(name)) if is_floating else scale_of(name)
        start = old[name].to(value.device) if name in old else torch.zeros_like(value)
        if scale == 1.0:
            result[name] = value
        elif is_floating:
            result[name] = torch.lerp(start, value, scale)
        else:
            # counters stay whole numbers, within their bound
            result[name] = start + ((value.double() - start.double()) * scale).floor().to(value.dtype)
    return result


# ---- medians of a cohort


def median_norms(updates: Sequence[Norms], entries: Mapping[str, int]) -> dict[str, float]:
    """Medians of the updates of one architecture; empty if there are too few, or most did not move.

    A tensor that most clients hardly move may still move as far, entry by entry, as the median update moves on average;
    a counter by one.

    Args:
        updates: norms of one update each.
        entries: floating tensor -> its number of entries.
    """
    if len(updates) < ENOUGH:
        return {}
    names = dict.fromkeys(name for norms in updates for name in norms if name not in (SENT, ALONG))
    medians = {name: median(norms.get(name, 0.0) for norms in updates) for name in names}
    if not medians.get(WHOLE):
        return {}
    total = sum(entries.values())
    # a tensor with a median of 0 would make every move infinitely many medians long
    floors = dict.fromkeys(names, 1.0) | {WHOLE: 0.0, SIZE: 0.0}
    floors |= {name: medians[WHOLE] * (count / total) ** 0.5 for name, count in entries.items()}
    return {name: max(value, floors[name]) for name, value in medians.items()}


def medians_across(updates: Sequence[tuple[Norms, Shapes]]) -> dict[str, float]:
    """Medians over models of all architectures; empty if there are too few, or most did not move.

    Tensors of one name and shape that enough of them have are compared as such, under labelled names. ``WHOLE`` is
    how far an entry moved, ``SENT`` how far the whole did for what was sent.
    """
    if len(updates) < ENOUGH:
        return {}
    entry = median(norms.get(WHOLE, 0.0) / max(_entries(shapes), 1) ** 0.5 for norms, shapes in updates)
    if not entry:
        return {}
    shares = [norms[WHOLE] / norms[SENT] for norms, _ in updates if norms.get(SENT)]
    overall = {WHOLE: entry, SENT: median(shares) if len(shares) >= ENOUGH else 0.0}
    return _common_medians(updates) | overall


def _common_medians(updates: Sequence[tuple[Norms, Shapes]]) -> dict[str, float]:
    """Medians of the tensors that enough updates have, and of their largest steps of counters."""
    values: dict[str, list[float]] = {}
    for norms, shapes in updates:
        for name, shape in shapes.items():
            values.setdefault(_labelled(name, shape), []).append(norms[name])
        if steps := [norms[name] for name in _counters(norms, shapes)]:
            values.setdefault(_COUNTERS, []).append(max(steps))
    medians = {label: median(of_updates) for label, of_updates in values.items() if len(of_updates) >= ENOUGH}
    if _COUNTERS in medians:  # counters count at least one step
        medians[_COUNTERS] = max(medians[_COUNTERS], 1.0)
    return medians


def expected_from_all(across: Norms, norms: Norms, shapes: Shapes, sent: Norms) -> dict[str, float]:
    """What the medians of all architectures let expect of one update.

    Args:
        across: see ``medians_across``.
        norms: of the update.
        shapes: of its floating tensors.
        sent: norms of what it started from.
    """
    if not across:
        return {}
    counters = _counters(norms, shapes) if _COUNTERS in across else set()
    # counters count batches, of which clients of other architectures may have a few times as many
    expected = dict.fromkeys(counters, _ELSEWHERE * across.get(_COUNTERS, 0.0))
    tensors = {}
    for name, shape in shapes.items():
        entries, common = across[WHOLE] * prod(shape) ** 0.5, across.get(_labelled(name, shape))
        # tensors with no counterpart elsewhere move as entries do on average, or in proportion to themselves
        alone = _ELSEWHERE * max(entries, across[SENT] * sent.get(name, 0.0))
        tensors[name] = alone if common is None else max(common, entries)
        if common is not None:  # tensors that only this architecture has are bounded as a whole
            expected[name] = tensors[name]
    return expected | {WHOLE: hypot(*(value for name, value in tensors.items() if not _is_statistic(name)))}


def within_all(own: Norms, across: Norms, shapes: Shapes) -> dict[str, float]:
    """Medians of one architecture; tensors in common with others are held within the medians of all.

    So clients who are alone with their architecture do not say for themselves what is normal for all.
    """
    bounded = dict(own)
    for name, shape in shapes.items():
        if name in own and (common := across.get(_labelled(name, shape))) is not None:
            entries = across[WHOLE] * prod(shape) ** 0.5
            bounded[name] = min(own[name], _ELSEWHERE * max(common, entries))
    return bounded


def at_rest(norms: Norms, shapes: Shapes, sent: Norms) -> dict[str, float]:
    """What stands for medians where most clients did not move: a part of what was sent."""
    total = sent.get(WHOLE, 0.0) * _AT_REST
    if not total:
        return {}
    entry = total / max(_entries(shapes), 1) ** 0.5
    tensors = {name: max(sent.get(name, 0.0) * _AT_REST, entry * prod(shape) ** 0.5) for name, shape in shapes.items()}
    return dict.fromkeys(_counters(norms, shapes), 1.0) | tensors | {WHOLE: total}


def largest_of(tables: Sequence[Norms]) -> dict[str, float]:
    names = {name for table in tables for name in table}
    return {name: max(table.get(name, 0.0) for table in tables) for name in names}


def _labelled(name: str, shape: tuple[int, ...]) -> str:
    return f"{name}{list(shape)}"


def _counters(norms: Norms, shapes: Shapes) -> set[str]:
    return set(norms) - set(shapes) - set(OVERALL)


def _entries(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
