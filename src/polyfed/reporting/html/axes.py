"""Axes of the small SVG charts: from values to places, and round numbers to mark them by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyfed.reporting.html.markup import Markup, tag

WIDTH, HEIGHT = 400, 245
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 26, 38


@dataclass(frozen=True)
class Axes:
    """A linear scale each way.

    Attributes:
        x: lowest and highest value across.
        y: lowest and highest value upwards; both are marks.
        marks: values marked at the left.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    marks: Sequence[float]

    def across(self, value: float) -> float:
        """Place of a value in SVG units from the left."""
        low, high = self.x
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low), 1)

    def up(self, value: float) -> float:
        """Place of a value in SVG units from the top."""
        low, high = self.y
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 1)

    def drawn(self, unit: str) -> Markup:
        """Grid, marks and the name of both axes; what is across are rounds."""
        lines = [tag("path", d=f"M{LEFT} {self.up(mark)}H{WIDTH - RIGHT}", class_="grid") for mark in self.marks]
        marks = [_text(LEFT - 6, self.up(mark) + 4, number, "end") for mark, number in self._labels()]
        rounds = [_text(self.across(n), HEIGHT - BOTTOM + 16, str(n), "middle") for n in whole_marks(*self.x)]
        names = [
            _text((WIDTH + LEFT - RIGHT) / 2, HEIGHT - 4, "round", "middle", "name"),
            _text(2, 11, unit, "start", "name"),
        ]
        return tag("g", lines, marks, rounds, names, class_="axes")

    def _labels(self) -> Iterable[tuple[float, str]]:
        step = self.marks[1] - self.marks[0]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(mark, f"{mark + 0.0:,.{digits}f}" if digits < 6 else f"{mark:.2g}") for mark in self.marks]


def axes_of(rounds: Iterable[float], values: Iterable[float], *, half: float = 0.0) -> Axes:
    """Axes that hold all rounds and values; from zero, unless the values lie far from it.

    Args:
        rounds: at least one.
        values: at least one finite one.
        half: room at either side in rounds, for bars.
    """
    across = list(rounds)
    left, right = min(across) - half, max(across) + half
    if right == left:
        left, right = left - 0.5, right + 0.5
    finite = list(values)
    low, high = min(finite), max(finite)
    if 0 <= low < 0.6 * high or low == high >= 0:
        low = 0.0
    marks = round_marks(low, high)
    return Axes((left, right), (marks[0], marks[-1]), marks)


def round_marks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose ``low`` and ``high``: ``most`` steps or fewer."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = (power * factor for factor in (1, 2, 5, 10, 20))
    step = next(s for s in steps if math.ceil(high / s - 1e-9) - math.floor(low / s + 1e-9) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def whole_marks(low: float, high: float, most: int = 8) -> list[int]:
    """Whole numbers within a range, evenly spaced."""
    first, last = math.ceil(low), math.floor(high)
    span = max(1, last - first)
    step = next(s * 10**p for p in range(12) for s in (1, 2, 5) if span / (s * 10**p) <= most)
    start = -(-first // step) * step
    return list(range(start, last + 1, step))


def _text(x: float, y: float, text: str, anchor: str, class_: str | None = None) -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=class_)
