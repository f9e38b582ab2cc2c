"""A study's figures: a column over an axis, over others, or as bars by row; validation by round; maps of claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, product
from typing import TYPE_CHECKING

from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import ROUND, AnyDrawing, Drawing, Point, RegimeMap, Study
from polyfed.lab.studies.tables import SIGNS, ClaimMap
from polyfed.reporting.compare import Spread
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, legend_below, styled, whole_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def drawings_of(study: Study) -> Sequence[AnyDrawing]:
    """Those that a study asks for; else its first column over its axis of numbers, or as bars."""
    if study.figures:
        return study.figures
    axis = next((name for name in study.axes if _numbers(study, name)), "rows")
    return [Drawing(column=next(iter(study.columns)), over=axis)]


def draw_study(results: Results, drawing: AnyDrawing) -> Figure:
    """A claim's map; or a column, as it is or minus that of the reference, a panel a point and what it is over."""
    return draw_map(ClaimMap(results, drawing)) if isinstance(drawing, RegimeMap) else _draw_column(results, drawing)


@styled
def _draw_column(results: Results, drawing: Drawing) -> Figure:
    study = results.study
    overs = drawing.over if isinstance(drawing.over, list) else [drawing.over]
    place = list(study.axes).index(overs[0]) if overs[0] in study.axes else None
    panels = [*product(overs, dict.fromkeys(_without(point, place) for point in study.points))]
    figure, axes = figure_grid(1, len(panels), title=study.title)
    for (over, panel), where in zip(panels, axes, strict=True):
        points = [point for point in study.points if _without(point, place) == panel]
        label = f"{drawing.column}: minus {results.reference}" if drawing.minus else drawing.column
        where.set(title=", ".join(panel), ylabel="validation" if over == ROUND else label)
        if over == "rows":
            _draw_bars(where, results, drawing, points[0])
        elif over == ROUND:
            _draw_curves(where, results, points[0])
        elif place is None:
            _draw_scatter(where, results, drawing.column, over, points[0])
        else:
            _draw_lines(where, results, drawing, over, points)
        if drawing.minus:
            where.axhline(0.0, color=GREY, linewidth=1)
    return figure


def _rows(results: Results, drawing: Drawing) -> list[str]:
    return [row for row in results.study.rows if not (drawing.minus and row == results.reference)]


def _shown(results: Results, drawing: Drawing, row: str, point: Point) -> tuple[float, float]:
    """Mean and length of its whiskers: the standard deviation, or half of the 95 % interval of a difference."""
    if not drawing.minus:
        spread = results.spread(row, point, drawing.column)
        return spread.mean, _whiskers([spread])[0]
    sample = results.difference((row, point, drawing.column), (results.reference, point, drawing.column))
    if sample is None:
        return math.nan, 0.0
    return sample.mean, 0.0 if math.isnan(sample.std) else sample.interval[1] - sample.mean


def _without(point: Point, place: int | None) -> Point:
    return point if place is None else point[:place] + point[place + 1 :]


def _numbers(study: Study, axis: str) -> list[float]:
    """The labels of an axis as numbers; empty if one is none."""
    try:
        return [float(label) for label in study.axes[axis].overrides]
    except ValueError:
        return []


def _draw_bars(axes: Axes, results: Results, drawing: Drawing, point: Point) -> None:
    rows = [row for row in _rows(results, drawing) if results.at(row, point, drawing.column)]
    shown = [_shown(results, drawing, row, point) for row in rows]
    heights, reach = [mean for mean, _ in shown], [whisker for _, whisker in shown]
    colours = [colour for colour, _ in zip(cycle(COLOURS), rows, strict=False)]
    axes.bar(range(len(rows)), heights, yerr=reach, color=colours, capsize=3)
    axes.set_xticks(
        range(len(rows)), rows, rotation=35 if len(rows) > 3 else 0, ha="right" if len(rows) > 3 else "center"
    )


def _draw_lines(axes: Axes, results: Results, drawing: Drawing, over: str, points: Sequence[Point]) -> None:
    study = results.study
    labels = list(study.axes[over].overrides)
    numbers = _numbers(study, over) or list(range(len(labels)))
    for row, colour in zip(_rows(results, drawing), cycle(COLOURS), strict=False):
        means, reach = zip(*(_shown(results, drawing, row, point) for point in points), strict=True)
        axes.errorbar(numbers, means, yerr=reach, label=row, color=colour, marker="o", markersize=4, capsize=3)
    axes.set_xticks(numbers, labels)
    axes.set_xlabel(over)
    legend_below(axes, 3)


def _draw_scatter(axes: Axes, results: Results, column: str, over: str, point: Point) -> None:
    for row, colour in zip(results.study.rows, cycle(COLOURS), strict=False):
        across, up = (results.spread(row, point, name) for name in (over, column))
        wide, high = _whiskers([across]), _whiskers([up])
        axes.errorbar([across.mean], [up.mean], yerr=high, xerr=wide, label=row, color=colour, fmt="o", capsize=3)
    axes.set_xlabel(over)
    legend_below(axes, 3)


def _draw_curves(axes: Axes, results: Results, point: Point) -> None:
    curves = {row: curve for row in results.study.rows if (curve := results.curves.get((row, point)))}
    for (row, curve), colour in zip(curves.items(), cycle(COLOURS), strict=False):
        spreads = [*curve.values()]
        means, reach = [spread.mean for spread in spreads], _whiskers(spreads)
        axes.errorbar([*curve], means, yerr=reach, label=row, color=colour, marker="o", markersize=3, capsize=3)
    axes.set_xlabel("round")
    whole_rounds(axes)
    legend_below(axes, 3)


def _whiskers(spreads: Sequence[Spread]) -> list[float]:
    return [0.0 if math.isnan(spread.std) else spread.std for spread in spreads]


@styled
def draw_map(claims: ClaimMap) -> Figure:
    """Colours by how far the claim is exceeded, with the mean differences."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    drawing = claims.drawing
    across, down = claims.labels(drawing.x), claims.labels(drawing.y)
    width = max(4.0, max(1.1, 0.09 * max(map(len, across))) * len(across) + 1.6)
    figure, (axes,) = figure_grid(1, 1, width=width, height=0.62 * len(down) + 1.3, title=drawing.map)
    known = [[claims.cell(x, y) for x in across] for y in down]
    excess = [[math.nan if cell is None else cell.excess.mean for cell in row] for row in known]
    means = (abs(cell.excess.mean) for cell in claims.cells.values())
    strongest = max((mean for mean in means if math.isfinite(mean)), default=0.0) or 1.0  # where colours end
    # from against the claim over white to for it; mixed with white, as figures stand on it
    against, towards = (tuple((part + 1) / 2 for part in to_rgb(colour)) for colour in (COLOURS[1], COLOURS[0]))
    colours = LinearSegmentedColormap.from_list("claim", [against, (1.0, 1.0, 1.0), towards])
    axes.imshow(excess, cmap=colours, vmin=-strongest, vmax=strongest, aspect="auto")
    axes.grid(visible=False)
    for place, row in enumerate(known):
        for at, cell in enumerate(row):
            weight = "normal" if cell is None or cell.mark == "open" else "bold"
            axes.text(at, place, "-" if cell is None else cell.text, ha="center", va="center", fontweight=weight)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel=drawing.x, ylabel=drawing.y or "")
    meaning = (
        f"blue, {SIGNS['held']}: for the claim; orange, {SIGNS['contradicted']}: against it; {SIGNS['open']}: open"
    )
    figure.supxlabel(meaning, fontsize=8, color=GREY)
    return figure
