"""Regime maps: at which points of two axes a claim holds, is contradicted, or stays open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from polyfed.lab.studies.drawings import RegimeMap
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Point, point_label
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, styled
from polyfed.reporting.statistics import CONFIDENCE, PairedSample
from polyfed.reporting.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

Mark = Literal["held", "contradicted", "open"]

_SIGNS: Mapping[Mark, str] = {"held": "✓", "contradicted": "✗", "open": "?"}
_NOTE = (
    f"Left minus right, paired by seed. ✓: the {CONFIDENCE * 100:g} % interval lies on the claim's side, ✗: on the "
    "other, ?: it reaches both, or one seed has none. Point by point, so that one of twenty would be marked where "
    "nothing differs: no verdicts."
)


@dataclass(frozen=True)
class MapCell:
    """A claim at one point.

    Attributes:
        sample: left minus right by seed.
        excess: the same beyond the claim's margin, towards the claim.
        digits: decimals shown.
    """

    sample: PairedSample
    excess: PairedSample
    digits: int

    @property
    def mark(self) -> Mark:
        low, high = (self.excess.mean,) * 2 if self.excess.is_exact else self.excess.interval
        return "held" if low > 0 else "contradicted" if high < 0 else "open"

    @property
    def text(self) -> str:
        """``+1.3 ✓``."""
        return f"{self.sample.mean:+.{self.digits}f} {_SIGNS[self.mark]}"


@dataclass(frozen=True)
class ClaimMap:
    """A claim at all points that have a figure.

    Attributes:
        results: of the study.
        drawing: which claim over which axes.
    """

    results: Results
    drawing: RegimeMap

    @property
    def points(self) -> list[Point]:
        """Those that all rows have."""
        return self.results.study.shared_points(self.drawing.claim.operands)

    @cached_property
    def cells(self) -> dict[Point, MapCell]:
        claim = self.drawing.claim
        digits = self.results.study.columns[claim.left[0].column].digits
        samples = {point: self.results.sample(claim.at(point_label(point))) for point in self.points}
        return {
            point: MapCell(sample, excess, digits)
            for point, sample in samples.items()
            if isinstance(sample, PairedSample) and isinstance(excess := claim.towards(sample), PairedSample)
        }

    def labels(self, axis: str | None) -> list[str]:
        return [""] if axis is None else list(self.results.study.axes[axis].overrides)

    def cell(self, x: str, y: str) -> MapCell | None:
        at = {self.drawing.x: x, self.drawing.y: y}
        return self.cells.get(tuple(at[axis] for axis in self.results.study.axes))

    # ---- in words

    @property
    def sentence(self) -> str:
        """``CLAIM: held at 2 of 9 points (...), contradicted at 1 (...), open at 5; 1 not run.``"""
        total, parts = len(self.points), list[str]()
        for mark in _SIGNS:
            points = [point for point, cell in self.cells.items() if cell.mark == mark]
            if points:
                where = "" if mark == "open" else f" ({'; '.join(self._named(points))})"
                parts.append(f"{mark} at {len(points)}{'' if parts else f' of {total} points'}{where}")
        if total > len(self.cells):
            parts.append(f"not run at {total - len(self.cells)}{'' if parts else f' of {total} points'}")
        return f"{self.drawing.map}: {', '.join(parts)}."

    def _named(self, points: Sequence[Point]) -> Iterator[str]:
        """``local epochs 5: public pairs 250, 1000``: points that differ in x alone stand together."""
        axes = list(self.results.study.axes)
        by_rest: dict[str, list[str]] = {}
        for point in points:
            at = dict(zip(axes, point, strict=True))
            own = at.pop(self.drawing.x)
            by_rest.setdefault(", ".join(f"{name} {label}" for name, label in at.items()), []).append(own)
        for where, labels in by_rest.items():
            yield f"{where}: " * bool(where) + f"{self.drawing.x} {', '.join(labels)}"

    @property
    def table(self) -> TextTable:
        """Rows are y, columns are x."""
        drawing = self.drawing
        corner = drawing.x if drawing.y is None else f"{drawing.y} / {drawing.x}"
        across = self.labels(drawing.x)
        body = [[y, *(cell.text if (cell := self.cell(x, y)) else "-" for x in across)] for y in self.labels(drawing.y)]
        return TextTable(f"Where it holds: {drawing.map}", (corner, *across), body, (self.sentence, _NOTE))

    # ---- drawn

    @property
    def strongest(self) -> float:
        """The largest difference, where colours end."""
        means = (abs(cell.excess.mean) for cell in self.cells.values())
        return max((mean for mean in means if math.isfinite(mean)), default=0.0) or 1.0


def claim_maps(results: Results) -> list[ClaimMap]:
    """Those that a study asks for."""
    return [ClaimMap(results, drawing) for drawing in results.study.figures if isinstance(drawing, RegimeMap)]


@styled
def draw_map(claims: ClaimMap) -> Figure:
    """Colours by how far the claim is exceeded, with the mean differences."""
    drawing = claims.drawing
    across, down = claims.labels(drawing.x), claims.labels(drawing.y)
    width = max(4.0, max(1.1, 0.09 * max(map(len, across))) * len(across) + 1.6)
    figure, (axes,) = figure_grid(1, 1, width=width, height=0.62 * len(down) + 1.3, title=drawing.map)
    known = [[claims.cell(x, y) for x in across] for y in down]
    excess = [[math.nan if cell is None else cell.excess.mean for cell in row] for row in known]
    axes.imshow(excess, cmap=_colours(), vmin=-claims.strongest, vmax=claims.strongest, aspect="auto")
    axes.grid(visible=False)
    for place, row in enumerate(known):
        for at, cell in enumerate(row):
            text, weight = ("-", "normal") if cell is None else (cell.text, _weight(cell))
            axes.text(at, place, text, ha="center", va="center", fontweight=weight)
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.set(xlabel=drawing.x, ylabel=drawing.y or "")
    figure.supxlabel(
        f"blue, {_SIGNS['held']}: for the claim; orange, {_SIGNS['contradicted']}: against it; {_SIGNS['open']}: open",
        fontsize=8, color=GREY,
    )  # fmt: skip
    return figure


def _weight(cell: MapCell) -> str:
    return "normal" if cell.mark == "open" else "bold"


def _colours() -> LinearSegmentedColormap:
    """From against the claim over white to for it; mixed with white, as figures stand on it."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    against, towards = (tuple((part + 1) / 2 for part in to_rgb(colour)) for colour in (COLOURS[1], COLOURS[0]))
    return LinearSegmentedColormap.from_list("claim", [against, (1.0, 1.0, 1.0), towards])
