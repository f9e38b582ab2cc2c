"""Figure of the share of the gap that methods close over public pairs, made from the records of papers/polyfed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import boards
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, styled
from study_records import StudyRecord
from verdicts import by_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "docs/images/gap.svg"
PANELS: Mapping[str, Sequence[str]] = {
    "same networks": (boards.SAME, "polyfed/gap-same"),
    "other encoders": (boards.OTHER, "polyfed/gap-other"),
    "other modalities": (boards.MODALITIES, "polyfed/gap-modalities"),
    "trained encoders": ("polyfed/gap-trained",),
}
"""Panel -> its studies: a board, with ``PAIRS`` public pairs, and one whose axis is the number of pairs."""
PAIRS, TICKS = 250, (100, 250, 1000)
LINES: Mapping[str, tuple[str, str]] = {
    "fedavg, holding public pairs": (COLOURS[0], "D"),
    "fedavg": (COLOURS[5], "D"),
    "change distillation, unpaired": (COLOURS[1], "o"),
    "change distillation": (COLOURS[4], "o"),
    "procrustes mean": (COLOURS[2], "s"),
    "creamfl": (COLOURS[3], "s"),
}
"""Row -> its colour and marker."""
SIZES = (10, 100, 1000)  # MiB of the legend
EMPTY = "not measured yet"


class Closed(NamedTuple):
    """Share of the gap at a number of public pairs, half of its 95 % interval, both in percent, and MiB of a run."""

    pairs: int
    share: float
    reach: float
    mib: float


Panel = Mapping[str, Sequence[Closed]]


def closed(recorded: Sequence[StudyRecord]) -> dict[str, Panel]:
    """Panel -> row -> what was measured, by ascending pairs."""
    known = by_name(recorded)
    panels: dict[str, Panel] = {}
    for title, names in PANELS.items():
        rows: dict[str, list[Closed]] = {}
        for record in (known[name] for name in names if name in known):
            for point in record.study.points:
                pairs = int(point[0].replace(",", "")) if point else PAIRS
                for row in (one for one in LINES if one in record.study.rows):
                    if (shared := boards.gap_closed(record, row, point)) is not None:
                        share, reach = (100 * part for part in shared)
                        mib = boards.cost_of(record, row, "MiB", point) or 0.0
                        rows.setdefault(row, []).append(Closed(pairs, share, reach, mib))
        panels[title] = {row: sorted(rows[row]) for row in LINES if row in rows}
    return panels


def gap_sentence(panels: Mapping[str, Panel]) -> str:
    """The figure in words: the shares by panel and row at each number of pairs."""
    texts = []
    for title, rows in panels.items():
        lines = (f"{row} {_listed(points)}" for row, points in rows.items())
        texts.append(f"{title}: {'; '.join(lines) or EMPTY}")
    ends = "the server alone (0 %) and all data in one place (100 %)"
    what = f"Share of the gap between {ends} that each method closes, by number of public pairs, with the MiB of a run"
    return f"{what}. {'. '.join(texts)}."


def _listed(points: Sequence[Closed]) -> str:
    return ", ".join(f"{one.share:.0f} % at {one.pairs:,} ({one.mib:,.0f} MiB)" for one in points)


@styled
def draw_gap(panels: Mapping[str, Panel]) -> Figure:
    """``closed`` as four panels with one scale; the area of a marker is MiB, a whisker the 95 % interval over seeds."""
    figure, axes = figure_grid(1, len(panels), width=2.2, height=4.3)
    every = [one for rows in panels.values() for points in rows.values() for one in points]
    low = min([-5.0, *(one.share - one.reach for one in every)]) - 5
    high = max([105.0, *(one.share + one.reach for one in every)]) + 5
    for ax, (title, rows) in zip(axes, panels.items(), strict=True):
        for end in (0, 100):
            ax.axhline(end, color=GREY, linewidth=1, linestyle="--", zorder=1)
        for place, (row, points) in enumerate(rows.items()):
            _draw_row(ax, row, points, 1.08 ** (place - (len(rows) - 1) / 2))
        if not rows:
            ax.text(0.5, 0.5, EMPTY, transform=ax.transAxes, ha="center", va="center", color=GREY)
        ax.set(title=title, xscale="log", xlim=(70, 1430), ylim=(low, high), xlabel="public pairs")
        ax.set_xticks(TICKS, [f"{count:,}" for count in TICKS])
        ax.minorticks_off()
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
    axes[0].set_ylabel("share of the gap, %")
    for text, height in (("pooled", 100), ("alone", 0)):
        axes[0].annotate(text, (72, height), xytext=(0, 2), textcoords="offset points", fontsize=8, color=GREY)
    _draw_legends(figure)
    return figure


def _draw_row(axes: Axes, row: str, points: Sequence[Closed], aside: float) -> None:
    """A row's line, whiskers and markers, moved aside a little as those of several rows would cover each other."""
    colour, marker = LINES[row]
    x, y = [one.pairs * aside for one in points], [one.share for one in points]
    axes.errorbar(x, y, [one.reach for one in points], color=colour, linewidth=1.2, elinewidth=1, zorder=2)
    sizes = [_area(one.mib) for one in points]
    axes.scatter(x, y, sizes, color=colour, marker=marker, edgecolor="white", linewidth=0.6, zorder=3)


def _area(mib: float) -> float:
    """Area of a marker, in square points."""
    return 14 + 0.35 * mib


def _draw_legends(figure: Figure) -> None:
    """The rows and the areas, below the panels."""
    from matplotlib.lines import Line2D

    how: Any = {"linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6}
    rows = [Line2D([], [], color=colour, marker=marker, label=row, **how) for row, (colour, marker) in LINES.items()]
    sizes = [
        Line2D([], [], color=GREY, marker="o", markersize=_area(mib) ** 0.5, label=f"{mib:,} MiB", **how)
        for mib in SIZES
    ]
    figure.legend(handles=rows, loc="outside lower left", ncols=3, fontsize=9, columnspacing=1)
    figure.legend(handles=sizes, loc="outside lower right", ncols=len(sizes), fontsize=9, columnspacing=1.2)
