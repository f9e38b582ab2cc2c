"""Charts by round as parts of inline SVG: from values to places, and round numbers to mark them by."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from polyfed.reporting.charts import MOST_DRAWN, ChartBand, ChartLine, RoundChart

WIDTH, HEIGHT = 400, 245
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 26, 38
_MOST_MARKERS = 25


@dataclass(frozen=True)
class ChartScale:
    """A linear scale each way.

    Attributes:
        x: lowest and highest value across.
        marks: values marked at the left, ascending; the first and the last are the ends of the scale.
    """

    x: tuple[float, float]
    marks: list[float]

    def across(self, value: float) -> float:
        low, high = self.x
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low), 1)

    def up(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low), 1)

    def labels(self) -> list[tuple[float, str]]:
        step = self.marks[1] - self.marks[0]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        # adding zero makes -0.0 a plain zero
        return [(self.up(m), f"{m + 0.0:,.{digits}f}" if digits < 6 else f"{m:.2g}") for m in self.marks]


class SvgShape(NamedTuple):
    """A group of an SVG: its class, its path, where its markers are, and legend entries that it belongs to."""

    style: str
    path: str
    markers: list[tuple[float, float]]
    keys: str


def scale_of(chart: RoundChart) -> ChartScale:
    """A scale that holds all rounds and values of a chart."""
    half = 0.6 if chart.stacked else 0.0  # bars need room at either side
    left, right = chart.rounds[0] - half, chart.rounds[-1] + half
    if right == left:
        left, right = left - 0.5, right + 0.5
    return ChartScale((left, right), round_marks(*chart.value_range))


def round_marks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose ``low`` and ``high``: ``most`` steps or fewer.

    Magnitudes are ``MOST_DRAWN`` at most.
    """
    size = max(abs(low), abs(high))
    # one value has no span of its own, and neither have two that differ by rounding
    span = high - low if high - low > 1e-9 * size else size
    span = span if span > 1 / MOST_DRAWN else 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = (power * factor for factor in (1, 2, 5, 10, 20))
    step = next(s for s in steps if math.ceil(high / s - 1e-9) - math.floor(low / s + 1e-9) <= most)
    # multiplied, not summed up: marks stay round; the tolerance is for 0.3 / 0.1 and the like
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def whole_marks(low: float, high: float, most: int = 8) -> list[int]:
    """Whole numbers within a range, evenly spaced."""
    first, last = math.ceil(low), math.floor(high)
    span = max(1, last - first)
    step = next(s * 10**p for p in range(12) for s in (1, 2, 5) if span / (s * 10**p) <= most)
    return list(range(-(-first // step) * step, last + 1, step))


def svg_parts(chart: RoundChart) -> dict[str, Any]:
    """What the template draws: marks of both axes, shapes from the back to the front, and data for the script."""
    scale = scale_of(chart)
    if chart.stacked:
        shapes = _bars(chart, scale)
    else:
        few = len(chart.rounds) <= _MOST_MARKERS
        shapes = [*(_band(scale, band) for band in chart.bands), *(_line(scale, line, few) for line in chart.lines)]
    places = [[number, scale.across(number)] for number in chart.rounds]
    lines = [_line_data(line, chart.rounds) for line in chart.lines if line.listed]
    data = json.dumps({"x": places, "lines": lines}, separators=(",", ":"))
    rounds = [(scale.across(number), number) for number in whole_marks(*scale.x)]
    return {"marks": scale.labels(), "rounds": rounds, "shapes": shapes, "data": data}


def _line(scale: ChartScale, line: ChartLine, few: bool) -> SvgShape:
    places = [(scale.across(number), scale.up(value)) for number, value in line.finite.items()]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places) if places else ""
    marked = len(places) == 1 or (few and not line.thin and line.dash != "dotted")
    style = f"line {line.dash} c{line.colour}{' thin' if line.thin else ''}"
    return SvgShape(style, path, places if marked else [], json.dumps(line.keys))


def _band(scale: ChartScale, band: ChartBand) -> SvgShape:
    outline = [*band.high.items(), *reversed(list(band.low.items()))]  # there above, and back below
    path = f"M{'L'.join(f'{scale.across(n):g} {scale.up(value):g}' for n, value in outline)}Z" if outline else ""
    return SvgShape(f"band c{band.colour}", path, [], json.dumps(band.keys))


def _bars(chart: RoundChart, scale: ChartScale) -> list[SvgShape]:
    one_round = scale.across(scale.x[0] + 1) - scale.across(scale.x[0])
    # visible in runs of hundreds of rounds, no slab in a run of one
    wide = max(1.0, min(36.0, 0.76 * one_round))
    below = dict.fromkeys(chart.rounds, 0.0)
    shapes = []
    for part in chart.lines:
        path = ""
        for number, value in part.finite.items():
            low, below[number] = below[number], below[number] + value
            if value > 0:
                x, y, top = scale.across(number) - wide / 2, scale.up(low), scale.up(below[number])
                path += f"M{x:.1f} {y:g}h{wide:.1f}V{top:g}h-{wide:.1f}Z"
        shapes.append(SvgShape(f"bar c{part.colour}", path, [], json.dumps(part.keys)))
    return shapes


def _line_data(line: ChartLine, rounds: Iterable[int]) -> dict[str, Any]:
    # what a page carries for hovering would otherwise be most of it
    rounded = {n: round(value, 4) if abs(value) >= 1 else float(f"{value:.4g}") for n, value in line.finite.items()}
    values = [rounded.get(number) for number in rounds]
    return {"label": line.label, "keys": line.keys, "colour": line.colour, "values": values}
