"""Charts by round as inline SVG: lines, bands and stacked bars; a script only adds hovering and hiding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from polyfed.reporting.html.axes import HEIGHT, WIDTH, Axes, axes_of
from polyfed.reporting.html.cells import Cell, Column, data_table, folded, number_cell
from polyfed.reporting.html.markup import Child, Markup, tag

COLOURS = 7
_MOST_MARKERS = 25
_MOST_ROWS = 200
_DRAWN_PLACES = 4

Series = Mapping[int, float]


@dataclass(frozen=True)
class Line:
    """Values by round.

    Attributes:
        label: name in tables and beside the pointer.
        values: round -> value; those that are not finite are left out.
        keys: legend entries that it belongs to; it is hidden while one of them is switched off.
        colour: 1 to ``COLOURS``, or 0 for grey.
        dash: ``solid``, ``dashed`` or ``dotted``.
        thin: for one of many.
        listed: whether it stands beside the pointer and in the table.
    """

    label: str
    values: Series
    keys: tuple[str, ...]
    colour: int = 1
    dash: str = "solid"
    thin: bool = False
    listed: bool = True


@dataclass(frozen=True)
class Band:
    """An area between two series of the same rounds."""

    low: Series
    high: Series
    keys: tuple[str, ...]
    colour: int = 1


@dataclass(frozen=True)
class Key:
    """An entry of a legend; ``mark`` is its sample: ``solid``, ``dashed``, ``dotted``, ``area`` or ``band``."""

    label: str
    colour: int = 0
    mark: str = "solid"


def line_chart(
    title: str, unit: str, lines: Sequence[Line], keys: Sequence[Key], bands: Sequence[Band] = (), note: str = ""
) -> Markup:
    """Lines by round, or nothing if none has a finite value."""
    finite = [_finite(line.values) for line in lines]
    if not any(finite):
        return Markup()
    rounds = sorted({number for values in finite for number in values})
    values = [
        v
        for series in (*finite, *(_finite(b.low) for b in bands), *(_finite(b.high) for b in bands))
        for v in series.values()
    ]
    axes = axes_of(rounds, values)
    shapes = [*(_band(axes, band) for band in bands), *(_line(axes, line, len(rounds)) for line in lines)]
    return _figure(title, unit, axes, shapes, [line for line in lines if line.listed], keys, rounds, note)


def stacked_chart(title: str, unit: str, parts: Sequence[Line], note: str = "") -> Markup:
    """Bars by round, the parts one upon the other; nothing if there is no value above zero."""
    rounds = sorted({number for part in parts for number in part.values})
    totals = [sum(part.values.get(number, 0.0) for part in parts) for number in rounds]
    if not any(total > 0 for total in totals):
        return Markup()
    axes = axes_of(rounds, [0.0, *totals], half=0.6)
    below = dict.fromkeys(rounds, 0.0)
    shapes = []
    for part in parts:
        shapes.append(_bars(axes, part, below))
        below = {number: below[number] + part.values.get(number, 0.0) for number in rounds}
    keys = [Key(part.label, part.colour, "area") for part in parts] if len(parts) > 1 else []
    return _figure(title, unit, axes, shapes, parts, keys, rounds, note)


def grid(*charts: Markup) -> Markup:
    """Charts beside each other as far as there is room; nothing if all are empty."""
    shown = [chart for chart in charts if chart]
    return tag("div", shown, class_="charts") if shown else Markup()


def _figure(
    title: str,
    unit: str,
    axes: Axes,
    shapes: Iterable[Markup],
    listed: Sequence[Line],
    keys: Sequence[Key],
    rounds: Sequence[int],
    note: str,
) -> Markup:
    data = {
        "x": [[number, axes.across(number)] for number in rounds],
        "lines": [
            {"label": line.label, "keys": line.keys, "colour": line.colour, "values": _column(line, rounds)}
            for line in listed
        ],
    }
    drawing = tag(
        "svg",
        axes.drawn(unit),
        shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: {unit} by round. The values are in the table below.",
    )
    return tag(
        "figure",
        tag("figcaption", title),
        tag("div", drawing, class_="plot", data_chart=json.dumps(data, separators=(",", ":"))),
        tag("div", [_legend(key) for key in keys], class_="legend") if keys else None,
        tag("p", note, class_="note") if note else None,
        _values(title, unit, listed, rounds),
        class_="chart",
    )


def _legend(key: Key) -> Markup:
    sample = tag("span", class_=f"sample {key.mark} c{key.colour}", aria_hidden="true")
    return tag("button", sample, key.label, type="button", aria_pressed="true", data_toggle=key.label)


def _values(title: str, unit: str, lines: Sequence[Line], rounds: Sequence[int]) -> Markup:
    step = -(-len(rounds) // _MOST_ROWS)
    shown = sorted({*rounds[::step], rounds[-1]})
    rows: list[list[Cell | Child]] = [
        [str(number), *(number_cell(line.values.get(number)) for line in lines)] for number in shown
    ]
    columns = [Column("round"), *(Column(line.label) for line in lines)]
    thinned = f" (every {step} rounds)" if step > 1 else ""
    return folded("Values", data_table(columns, rows, caption=f"{title}, {unit}{thinned}"))


def _line(axes: Axes, line: Line, rounds: int) -> Markup:
    places = [(axes.across(number), axes.up(value)) for number, value in _finite(line.values).items()]
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in places) if places else ""
    single = len(places) == 1 or (rounds <= _MOST_MARKERS and not line.thin and line.dash != "dotted")
    dots = [tag("circle", cx=x, cy=y, r=2.6) for x, y in places] if single else []
    classes = f"line {line.dash} c{line.colour}{' thin' if line.thin else ''}"
    return tag("g", tag("path", d=path), dots, class_=classes, data_keys=json.dumps(line.keys))


def _band(axes: Axes, band: Band) -> Markup:
    low, high = _finite(band.low), _finite(band.high)
    there = [f"{axes.across(n):g} {axes.up(high[n]):g}" for n in high if n in low]
    back = [f"{axes.across(n):g} {axes.up(low[n]):g}" for n in reversed(low) if n in high]
    path = tag("path", d=f"M{'L'.join([*there, *back])}Z") if there else None
    return tag("g", path, class_=f"band c{band.colour}", data_keys=json.dumps(band.keys))


def _bars(axes: Axes, part: Line, below: Mapping[int, float]) -> Markup:
    wide = max(1.0, min(36.0, 0.76 * (axes.across(axes.x[0] + 1) - axes.across(axes.x[0]))))
    found = ((n, below[n], value) for n, value in _finite(part.values).items() if value > 0)
    bars = "".join(
        f"M{axes.across(n) - wide / 2:.1f} {axes.up(low):g}h{wide:.1f}V{axes.up(low + value):g}h-{wide:.1f}Z"
        for n, low, value in found
    )
    return tag("g", tag("path", d=bars), class_=f"bar c{part.colour}", data_keys=json.dumps([part.label]))


def _column(line: Line, rounds: Sequence[int]) -> list[float | None]:
    finite = _finite(line.values)
    return [_short(finite[number]) if number in finite else None for number in rounds]


def _short(value: float) -> float:
    return round(value, _DRAWN_PLACES) if abs(value) >= 1 else float(f"{value:.4g}")


def _finite(values: Series) -> dict[int, float]:
    return {number: value for number, value in values.items() if math.isfinite(value)}
