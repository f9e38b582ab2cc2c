"""Figures next to the table of a page: validation by round, and outcomes against costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import TYPE_CHECKING, Any

from polyfed.lab.studies.figures import draw_map, draw_study, drawings_of, role_of
from polyfed.lab.studies.results import Curve, Results
from polyfed.lab.studies.study import ROUND, Drawing, RegimeMap, Study, point_label
from polyfed.lab.studies.tables import ClaimMap
from polyfed.reporting.compare import Spread
from polyfed.reporting.figures import GREY, ROLES, ROLES_IN_WORDS, figure_grid, styled, whole_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 8  # panels


@dataclass(frozen=True)
class Picture:
    """A figure of a study.

    Attributes:
        name: Stem of its file, such as ``search`` or ``map-1``.
        sentence: Its caption; may be empty.
        draw: Function that makes it.
    """

    name: str
    sentence: str
    draw: Callable[[], Figure]


def pictures_of(results: Results) -> list[Picture]:
    """Curves, if there are any, and the figures that the study requests."""
    pictures, counts = [], dict[str, int]()
    if results.curves:
        few = len({point for _, point in results.curves}) <= _MOST_POINTS
        pictures += [Picture("curves", curves_sentence(results), partial(draw_curves, results))] if few else []
    asked = [one for one in drawings_of(results.study) if getattr(one, "over", "") != ROUND]  # curves are there already
    for drawing in asked if results.values else ():
        if isinstance(drawing, RegimeMap):
            claims = ClaimMap(results, drawing)
            stem, sentence, draw = "map", claims.sentence, partial(draw_map, claims)
        elif asked_over := costs_of(results.study, drawing):
            costs = [cost for cost in asked_over if front(results, drawing.column, cost)]
            if not costs:
                continue  # a study that was run before it measured them
            sentence = costs_sentence(results, drawing.column, costs)
            stem, draw = "costs", partial(draw_costs, results, drawing.column, costs)
        else:
            stem, sentence, draw = "figure", "", partial(draw_study, results, drawing)
        counts[stem] = counts.get(stem, 0) + 1
        pictures.append(Picture(f"{stem}-{counts[stem]}", sentence, draw))
    return pictures


def _drawn(spreads: Iterable[Spread]) -> tuple[list[float], list[float]]:
    """Means and lengths of whiskers."""
    known = list(spreads)
    return [one.mean for one in known], [0.0 if math.isnan(one.std) else one.std for one in known]


# ---- validation by round


def curves_sentence(results: Results) -> str:
    """Which rows still rise in the last third of their rounds: by more than one standard deviation over seeds."""
    tuning = results.study.tuning
    lower = bool(tuning and tuning.column and tuning.column.lower)
    curves = {where: curve for where, curve in results.curves.items() if has_middle(curve)}
    if not curves:
        return "Validated too seldom to decide whether it still rises."
    rising = [(row, at) for (row, at), curve in curves.items() if is_rising(curve, lower)]
    several = len({point for _, point in results.curves}) > 1
    names = [f"{row} ({point_label(at)})" if several else row for row, at in rising]
    return f"In the last third of rounds validation gains more than its spread over seeds: {_listed(names)}."


def has_middle(curve: Curve) -> bool:
    """True if the middle third of the rounds was validated, the reference of a gain."""
    return any(max(curve) <= 3 * number <= 2 * max(curve) for number in curve)


def is_rising(curve: Curve, lower: bool = False) -> bool:
    """True if the gain over the last third of the rounds exceeds one standard deviation over seeds."""
    last = max(curve)
    before = max((number for number in curve if 3 * number <= 2 * last), default=last)
    gain = curve[last].mean - curve[before].mean
    return (-gain if lower else gain) > max(curve[last].std, 0.0)


def _listed(rows: Sequence[str]) -> str:
    return "; ".join(rows) or "no row"


@styled
def draw_curves(results: Results) -> Figure:
    """A panel a point: validation over rounds, a line a row, with the standard deviation over seeds."""
    study = results.study
    points = list(dict.fromkeys(point for _, point in results.curves))
    across = min(2, len(points))
    size = 8.8 / across, 2.4 if across > 1 else 3.4
    figure, panels = figure_grid(-(-len(points) // across), across, width=size[0], height=size[1])
    for axes, point in zip(panels, points, strict=False):
        curves = {row: curve for row in study.rows if (curve := results.curves.get((row, point)))}
        for (row, curve), dashes in zip(curves.items(), cycle(["-", "--", "-.", ":"]), strict=False):
            rounds, means, reach = list(curve), *_drawn(curve.values())
            how: Any = {"color": ROLES[role_of(study, row)], "zorder": 3 if role_of(study, row) == "own" else 2}
            axes.plot(
                rounds,
                means,
                dashes if role_of(study, row) == "rival" else "-",
                linewidth=1.4,
                marker="o",
                markersize=2.5,
                **how,
            )
            low, high = ([m + sign * r for m, r in zip(means, reach, strict=True)] for sign in (-1, 1))
            axes.fill_between(rounds, low, high, alpha=0.1, linewidth=0, **how)
        axes.set(title=point_label(point), xlabel="round", ylabel="validation")
        axes.set_xlim(right=max(max(curve) for curve in curves.values()))
        whole_rounds(axes)
        _label_ends(axes, study, {row: (max(curve), curve[max(curve)].mean) for row, curve in curves.items()}, size[1])
    for axes in panels[len(points) :]:
        axes.set_axis_off()
    figure.supxlabel(f"area: standard deviation over seeds; {ROLES_IN_WORDS}", fontsize=8, color=GREY)
    return figure


def _label_ends(axes: Axes, study: Study, ends: Mapping[str, tuple[float, float]], inches: float) -> None:
    """Names of rows at the right, in the order of their lines' ends and as near as they may be."""
    from scipy.optimize import isotonic_regression

    low, high = axes.get_ylim()
    rows, gap = sorted(ends, key=lambda row: ends[row][1]), 0.15 * (high - low) / (inches - 0.7)
    nearest = isotonic_regression([ends[row][1] - gap * place for place, row in enumerate(rows)]).x
    for place, row in enumerate(rows):
        colour = ROLES[role_of(study, row)]
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": colour, "shrinkA": 0, "relpos": (0, 0.5)}
        at: Any = {"xytext": (1.03, nearest[place] + gap * place), "textcoords": ("axes fraction", "data")}
        axes.annotate(row, ends[row], fontsize=8, color=colour, va="center", arrowprops=line, **at)


# ---- costs


def front(results: Results, column: str, cost: str) -> list[str]:
    """Rows but ceilings than which no other is better in a column at no more of a cost, at the first point."""
    columns, point = results.study.columns, results.study.points[0]
    signs = (1 if columns[cost].lower else -1), (1 if columns[column].lower else -1)
    at = {row: [results.spread(row, point, name).mean for name in (cost, column)] for row in results.study.rows}
    known = {row: (signs[0] * x, signs[1] * y) for row, (x, y) in at.items() if math.isfinite(x + y)}
    best, rows = math.inf, []
    for row in sorted(known, key=known.__getitem__):
        if role_of(results.study, row) != "ceiling" and known[row][1] < best:
            best = known[row][1]
            rows.append(row)
    return rows


def costs_of(study: Study, drawing: Drawing) -> list[str]:
    """The columns that a column is drawn over, if it is."""
    over = drawing.over if isinstance(drawing.over, list) else [drawing.over]
    return [name for name in over if name in study.columns and name not in study.axes]


def costs_sentence(results: Results, column: str, costs: Sequence[str]) -> str:
    """Which rows are not dominated, by cost."""
    rows = (f"{cost}: {_listed(front(results, column, cost))}" for cost in costs)
    return f"Not dominated, {column} against {'. Against '.join(rows)}."


@styled
def draw_costs(results: Results, column: str, costs: Sequence[str]) -> Figure:
    """A panel a cost, at the first point: a column over it, with the front; rows that are dominated are hollow."""
    study, point = results.study, results.study.points[0]
    figure, panels = figure_grid(len(costs), 1, width=8.8, height=1.9)
    for axes, cost in zip(panels, costs, strict=True):
        best, at = front(results, column, cost), {}
        for row in study.rows:
            x, y = (results.spread(row, point, name) for name in (cost, column))
            if not math.isfinite(x.mean + y.mean):
                continue
            at[row] = x.mean, y.mean
            wide, high = ([0.0 if math.isnan(one.std) else one.std] for one in (x, y))
            how: Any = {"color": ROLES[role_of(study, row)], "marker": "D" if role_of(study, row) == "ceiling" else "o"}
            how |= {} if row in best else {"markerfacecolor": "white"}
            axes.errorbar([x.mean], [y.mean], yerr=high, xerr=wide, markersize=6, elinewidth=0.8, linestyle="", **how)
        steps = "steps-post" if study.columns[cost].lower else "steps-pre"
        axes.plot(*zip(*(at[row] for row in best), strict=True), color=GREY, linewidth=1, drawstyle=steps, zorder=0)
        _scale(axes, [x for x, _ in at.values()])
        axes.margins(y=0.12)
        axes.set(xlabel=cost, ylabel=column)
        _label_points(axes, study, at, (8.0, 1.3))
    figure.supxlabel(f"line: rows that are not dominated; {ROLES_IN_WORDS}", fontsize=8, color=GREY)
    return figure


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Set a logarithmic axis for costs that differ much, beginning at the least positive one."""
    from matplotlib.ticker import EngFormatter

    positive = [value for value in values if value > 0]
    if positive and max(positive) > 20 * min(positive):
        axes.set_xscale("symlog", linthresh=min(positive), linscale=0.3)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.margins(x=0.1)


def _label_points(axes: Axes, study: Study, at: Mapping[str, tuple[float, float]], inches: tuple[float, float]) -> None:
    """Write names of rows next to their points, moved up or down if one would cover another or a point.

    Args:
        axes: Axes with their limits.
        study: Study of the rows.
        at: Row -> its point.
        inches: Rough size of the axes.
    """
    axes.autoscale_view()  # at once, as positions are needed
    to_axes = axes.transData + axes.transAxes.inverted()
    positions = {row: to_axes.transform(point) * inches for row, point in at.items()}
    taken = [(x - 0.05, y - 0.05, x + 0.05, y + 0.05) for x, y in positions.values()]
    for row in sorted(at, key=lambda row: -at[row][1]):
        (x, y), wide = positions[row], 0.07 * len(row)
        for step, side in product(sorted(range(-12, 13), key=abs), (1, -1)):
            left, middle = x + 0.09 * side - (wide if side < 0 else 0.0), y + 0.13 * step
            box = (left, middle - 0.06, left + wide, middle + 0.06)
            is_inside = min(box) >= 0 and box[2] <= inches[0] and box[3] <= inches[1]
            if is_inside and not any(_cover(box, other) for other in taken):
                break
        else:
            step, side = 0, 1
        taken.append(box)
        colour = ROLES[role_of(study, row)]
        line: Any = {"arrowstyle": "-", "linewidth": 0.5, "color": colour, "shrinkA": 0, "shrinkB": 3}
        line = {**line, "relpos": (0 if side > 0 else 1, 0.5)} if step else None
        offset, ha = (6.5 * side, 9.4 * step), "left" if side > 0 else "right"
        how: Any = {"xytext": offset, "textcoords": "offset points", "ha": ha, "va": "center", "arrowprops": line}
        how["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # lines end next to it
        axes.annotate(row, at[row], fontsize=8, color=colour, **how)


def _cover(one: Sequence[float], other: Sequence[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
