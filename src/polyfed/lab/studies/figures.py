"""Figures of a study: a column against an axis, against other columns, or per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import ROUND, AnyDrawing, Drawing, Point, RegimeMap, Study
from polyfed.lab.studies.tables import SIGNS, ClaimMap
from polyfed.reporting.compare import Spread
from polyfed.reporting.figures import (
    COLOURS,
    GREY,
    ROLES,
    ROLES_IN_WORDS,
    figure_grid,
    legend_below,
    styled,
    whole_rounds,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_CONTROLS = {"server-only", "server alone", "no-private", "local", "untrained"}
_CEILINGS = {"pooled", "centralised"}
_LOOKS = (("-", "o"), ("--", "s"), ("-.", "D"), (":", "^"), ("-", "v"), ("--", "P"))  # of rows of one role


def role_of(study: Study, row: str) -> str:
    """Role of a row; ``own`` for the subject of the first judged claim and its variants, such as ``fedafd, K=10``."""
    settings, judged = study.resolved(row), study.claims.to_judge
    method: Any = settings.set.get("algorithm")
    names = {row, method.get("name") if isinstance(method, Mapping) else method, settings.twin and settings.twin.kind}
    if names & (_CEILINGS | _CONTROLS):
        return "ceiling" if names & _CEILINGS else "control"
    return "own" if judged and row.partition(",")[0] == judged[0].left[0].row.partition(",")[0] else "rival"


def _looks(study: Study, rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Row -> style with the colour of its role; rows of one role differ by dashes and markers."""
    roles = [role_of(study, row) for row in rows]
    looks: dict[str, dict[str, Any]] = {}
    for place, (row, role) in enumerate(zip(rows, roles, strict=True)):
        dash, marker = _LOOKS[roles[:place].count(role) % len(_LOOKS)]
        looks[row] = dict(label=row, color=ROLES[role], linestyle=dash, marker=marker, markersize=4, capsize=3)
    return looks


def drawings_of(study: Study) -> Sequence[AnyDrawing]:
    """Figures that a study asks for; else its first column over its axis of numbers, or as bars."""
    if study.figures:
        return study.figures
    axis = next((name for name in study.axes if _numbers(study, name)), "rows")
    return [Drawing(column=next(iter(study.columns)), over=axis)]


def draw_study(results: Results, drawing: AnyDrawing, names: Mapping[str, str] | None = None) -> Figure:
    """A claim's map; or a column, as it is or minus that of the reference, a panel a point and what it is over.

    Args:
        results: Results of the study.
        drawing: The requested figure.
        names: Row -> label of its bar, if it differs from its name.
    """
    if isinstance(drawing, RegimeMap):
        return draw_map(ClaimMap(results, drawing))
    return _draw_column(results, drawing, names or {})


@styled
def _draw_column(results: Results, drawing: Drawing, names: Mapping[str, str]) -> Figure:
    study = results.study
    overs = drawing.over if isinstance(drawing.over, list) else [drawing.over]
    place = list(study.axes).index(overs[0]) if overs[0] in study.axes else None
    panels = [*product(overs, dict.fromkeys(_without(point, place) for point in study.points))]
    known = {row for row, _, column in results.values if column == drawing.column}
    size = (7.0, 1.5 + 0.27 * len(known)) if overs == ["rows"] else (5.0, 3.6)
    figure, axes = figure_grid(1, len(panels), width=size[0], height=size[1], title=study.title)
    figure.supxlabel(ROLES_IN_WORDS, fontsize=8, color=GREY)
    for (over, panel), where in zip(panels, axes, strict=True):
        points = [point for point in study.points if _without(point, place) == panel]
        label = f"{drawing.column}: minus {results.reference}" if drawing.minus else drawing.column
        where.set(title=", ".join(panel), ylabel="validation" if over == ROUND else label)
        if over == "rows":
            _draw_bars(where, results, drawing, points[0], names)
            where.set(xlabel=label, ylabel="")
        elif over == ROUND:
            _draw_curves(where, results, points[0])
        elif place is None:
            _draw_scatter(where, results, drawing.column, over, points[0])
        else:
            _draw_lines(where, results, drawing, over, points)
        if drawing.minus:
            (where.axvline if over == "rows" else where.axhline)(0.0, color=GREY, linewidth=1)
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
    """The labels of an axis as numbers; empty if one is not a number."""
    try:
        return [float(label) for label in study.axes[axis].overrides]
    except ValueError:
        return []


def _draw_bars(axes: Axes, results: Results, drawing: Drawing, point: Point, names: Mapping[str, str]) -> None:
    """Bars with the best at the top; a ceiling that would flatten the others is cut."""
    shown = {row: _shown(results, drawing, row, point) for row in _rows(results, drawing)}
    lower = results.study.columns[drawing.column].lower
    rows = sorted((row for row in shown if math.isfinite(shown[row][0])), key=lambda row: shown[row][0], reverse=lower)
    roles = {row: role_of(results.study, row) for row in rows}
    most = 1.3 * max((sum(shown[row]) for row in rows if roles[row] != "ceiling"), default=math.inf)
    for row in rows:
        mean, reach = shown[row]
        is_cut = roles[row] == "ceiling" and 0 < most < mean
        length, reach = (most, 0.0) if is_cut else (mean, reach)
        bar = axes.barh(
            names.get(row, row), length, xerr=reach, height=0.7, color=ROLES[roles[row]], ecolor=GREY, capsize=2
        )
        text = f"{mean:+.1f}" if drawing.minus else f"{mean:.1f}"
        axes.bar_label(bar, [f"{text} (bar cut)" if is_cut else text], padding=4, fontsize=8)
    axes.margins(x=0.15)  # room for the values
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _draw_lines(axes: Axes, results: Results, drawing: Drawing, over: str, points: Sequence[Point]) -> None:
    study = results.study
    labels = list(study.axes[over].overrides)
    numbers = _numbers(study, over) or list(range(len(labels)))
    for row, look in _looks(study, _rows(results, drawing)).items():
        means, reach = zip(*(_shown(results, drawing, row, point) for point in points), strict=True)
        axes.errorbar(numbers, means, yerr=reach, **look)
    axes.set_xticks(numbers, labels)
    axes.set_xlabel(over)
    legend_below(axes, 3)


def _draw_scatter(axes: Axes, results: Results, column: str, over: str, point: Point) -> None:
    for row, look in _looks(results.study, list(results.study.rows)).items():
        across, up = (results.spread(row, point, name) for name in (over, column))
        wide, high = _whiskers([across]), _whiskers([up])
        axes.errorbar([across.mean], [up.mean], yerr=high, xerr=wide, **look | {"linestyle": ""})
    axes.set_xlabel(over)
    legend_below(axes, 3)


def _draw_curves(axes: Axes, results: Results, point: Point) -> None:
    curves = {row: curve for row in results.study.rows if (curve := results.curves.get((row, point)))}
    for row, look in _looks(results.study, list(curves)).items():
        spreads = [*curves[row].values()]
        means, reach = [spread.mean for spread in spreads], _whiskers(spreads)
        axes.errorbar([*curves[row]], means, yerr=reach, **look)
    axes.set_xlabel("round")
    whole_rounds(axes)
    legend_below(axes, 3)


def _whiskers(spreads: Sequence[Spread]) -> list[float]:
    return [0.0 if math.isnan(spread.std) else spread.std for spread in spreads]


@styled
def draw_map(claims: ClaimMap) -> Figure:
    """Mean differences with their verdicts, coloured by size."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    drawing = claims.drawing
    across, down = claims.labels(drawing.x), claims.labels(drawing.y)
    width = max(4.0, max(1.1, 0.09 * max(map(len, across))) * len(across) + 1.6)
    figure, (axes,) = figure_grid(1, 1, width=width, height=0.62 * len(down) + 1.3, title=drawing.map)
    known = [[claims.cell(x, y) for x in across] for y in down]
    estimates = [
        [math.nan if cell is None or not cell.comparison else cell.comparison.estimate for cell in row] for row in known
    ]
    sizes = (abs(one) for row in estimates for one in row if math.isfinite(one))
    strongest = max(sizes, default=0.0) or 1.0  # where colours end
    # from below over white to above; mixed with white, as figures stand on it
    below, above = (tuple((part + 1) / 2 for part in to_rgb(colour)) for colour in (COLOURS[1], COLOURS[0]))
    colours = LinearSegmentedColormap.from_list("claim", [below, (1.0, 1.0, 1.0), above])
    axes.imshow(estimates, cmap=colours, vmin=-strongest, vmax=strongest, aspect="auto")
    axes.grid(visible=False)
    for place, row in enumerate(known):
        for at, cell in enumerate(row):
            weight = "normal" if cell is None or cell.verdict == "undecided" else "bold"
            how: Any = {"ha": "center", "va": "center", "fontweight": weight, "color": "#000000"}  # on pale colours
            axes.text(at, place, "-" if cell is None else claims.text(cell), **how)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel=drawing.x, ylabel=drawing.y or "")
    figure.supxlabel("; ".join(f"{sign}: {verdict}" for verdict, sign in SIGNS.items()), fontsize=8, color=GREY)
    return figure
