"""Median norms of a cohort's updates: of clients of one architecture, and across architectures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot, prod
from statistics import median

from polyfed.federation.bounds import ENOUGH
from polyfed.federation.update_norms import ALONG, OVERALL, SENT, SIZE, WHOLE, Norms, is_statistic

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a floating tensor -> its shape."""

_COUNTERS = "#"  # key of the median step of counters, in all architectures
_AT_REST = 0.25  # of what was sent: stands for the median where most clients did not move and nothing else is known
_ELSEWHERE = 4.0  # room for what has no counterpart in models of other architectures, which move otherwise


def median_norms(updates: Sequence[Norms], entries: Mapping[str, int]) -> dict[str, float]:
    """Medians of the updates of one architecture; empty if there are too few, or most did not move.

    A tensor that most clients hardly move may still move as far, entry by entry, as the median update moves on average;
    a counter by one.

    Args:
        updates: norms of one update each.
        entries: floating tensor -> its number of entries.
    """
    names = dict.fromkeys(name for norms in updates for name in norms if name not in (SENT, ALONG))
    if len(updates) < ENOUGH:
        return {}
    medians = {name: median(norms.get(name, 0.0) for norms in updates) for name in names}
    if not medians.get(WHOLE):
        return {}
    total = sum(entries.values())
    floors = dict.fromkeys(names, 1.0) | {WHOLE: 0.0, SIZE: 0.0}
    floors |= {name: medians[WHOLE] * (count / total) ** 0.5 for name, count in entries.items()}
    return {name: max(value, floors[name]) for name, value in medians.items()}


def medians_across(updates: Sequence[tuple[Norms, Shapes]]) -> dict[str, float]:
    """Medians over models of all architectures; empty if there are too few, or most did not move.

    Tensors of one name and shape that enough of them have are compared as such, under ``labelled`` names. ``WHOLE`` is
    how far an entry moved, ``SENT`` how far the whole did for what was sent.
    """
    if len(updates) < ENOUGH:
        return {}
    entry = median(norms.get(WHOLE, 0.0) / max(_entries(shapes), 1) ** 0.5 for norms, shapes in updates)
    if not entry:
        return {}
    shares = [norms[WHOLE] / norms[SENT] for norms, _ in updates if norms.get(SENT)]
    overall = {WHOLE: entry, SENT: median(shares) if len(shares) >= ENOUGH else 0.0}
    return _common_tensors(updates) | _counter_step(updates) | overall


def _common_tensors(updates: Sequence[tuple[Norms, Shapes]]) -> dict[str, float]:
    """Medians of the tensors that enough updates have, by ``labelled`` names."""
    by_label: dict[str, list[float]] = {}
    for norms, shapes in updates:
        for name, shape in shapes.items():
            by_label.setdefault(labelled(name, shape), []).append(norms[name])
    return {label: median(values) for label, values in by_label.items() if len(values) >= ENOUGH}


def _counter_step(updates: Sequence[tuple[Norms, Shapes]]) -> dict[str, float]:
    """Median of the updates' largest steps of counters, at least one; nothing if too few have counters."""
    steps = [[norms[name] for name in _counters(norms, shapes)] for norms, shapes in updates]
    largest = [max(own) for own in steps if own]
    return {_COUNTERS: max(median(largest), 1.0)} if len(largest) >= ENOUGH else {}


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
    expected = dict.fromkeys(counters, _ELSEWHERE * across.get(_COUNTERS, 0.0))
    tensors = {name: _expected_of(name, shape, across, sent) for name, shape in shapes.items()}
    common = {name: value for name, value in tensors.items() if labelled(name, shapes[name]) in across}
    total = hypot(*(value for name, value in tensors.items() if not is_statistic(name)))
    return expected | common | {WHOLE: total}  # tensors that only this architecture has are bounded as a whole


def _expected_of(name: str, shape: tuple[int, ...], across: Norms, sent: Norms) -> float:
    entries: float = across[WHOLE] * prod(shape) ** 0.5
    common = across.get(labelled(name, shape))
    if common is not None:
        return max(common, entries)
    return _ELSEWHERE * max(entries, across[SENT] * sent.get(name, 0.0))


def within_all(own: Norms, across: Norms, shapes: Shapes) -> dict[str, float]:
    """Medians of one architecture; tensors in common with others are held within the medians of all.

    So clients who are alone with their architecture do not say for themselves what is usual for all.
    """
    bounded = dict(own)
    for name, shape in shapes.items():
        if name in own and (common := across.get(labelled(name, shape))) is not None:
            entries = across[WHOLE] * prod(shape) ** 0.5
            bounded[name] = min(own[name], _ELSEWHERE * max(common, entries))
    return bounded


def at_rest(norms: Norms, shapes: Shapes, sent: Norms) -> dict[str, float]:
    """What stands for medians where most clients did not move: a part of what was sent."""
    total = sent.get(WHOLE, 0.0) * _AT_REST
    if not total:
        return {}
    entry = total / max(_entries(shapes), 1) ** 0.5
    counters = {name: 1.0 for name in norms if name not in shapes and name not in OVERALL}
    tensors = {name: max(sent.get(name, 0.0) * _AT_REST, entry * prod(shape) ** 0.5) for name, shape in shapes.items()}
    return counters | tensors | {WHOLE: total}


def largest_of(tables: Sequence[Norms]) -> dict[str, float]:
    """Name -> its largest value in any of the tables."""
    names = {name for table in tables for name in table}
    return {name: max(table.get(name, 0.0) for table in tables) for name in names}


def labelled(name: str, shape: tuple[int, ...]) -> str:
    """A tensor's name with its shape."""
    return f"{name}{list(shape)}"


def _counters(norms: Norms, shapes: Shapes) -> set[str]:
    return set(norms) - set(shapes) - set(OVERALL)


def _entries(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
