"""The picture of README.md: what a server gains from its clients, by method and by number of public pairs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

from polyfed.core.files import write_atomically
from polyfed.reporting.figures import COLOURS, GREY, figure_grid, legend_below, settle_legends, styled
from polyfed.reporting.paired import PairedDifference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAIRS = 500
"""Size of P of the methods that are compared."""
BY_SIZE = ("change", "procrustes")
"""Rows that are drawn for every size of P."""
LABELS = {
    "change": "change distillation",
    "procrustes": "mean after Procrustes",
    "similarity": "similarity distillation",
    "mean": "mean as it is",
    "creamfl": "CreamFL",
    "fedmd": "FedMD",
    "fedafd": "FedAFD",
    "no-private-twin": "change distillation,\nclients hold public pairs only",
    "pooled-twin": "all data at the server",
}
_TITLE = "R@1 sum of the server above that of the server alone, tuned"


def draw_gains(differences: Mapping[str, Sequence[PairedDifference]], path: Path) -> Path:
    """Write the picture as an SVG file, on white so that dark pages show it too; returns ``path``.

    Args:
        differences: table, ``pairs<size of P>``, -> each row of it against the server alone.
        path: of the file.

    Raises:
        ValueError: nothing to draw was measured.
    """
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "polyfed"}):
        buffer = io.BytesIO()
        gains_figure(differences).savefig(buffer, format="svg", facecolor="white", metadata={"Date": None})
    write_atomically(path, buffer.getvalue())
    return path


@styled
def gains_figure(differences: Mapping[str, Sequence[PairedDifference]]) -> Figure:
    """Mean differences over seeds with 95 % intervals: rows at ``PAIRS`` pairs, and ``BY_SIZE`` over sizes of P."""
    tables = {
        int(table[5:]): _by_row(table, rows) for table, rows in differences.items() if re.match(r"pairs\d+$", table)
    }
    if not tables.get(PAIRS):
        raise ValueError(
            f"no differences at {PAIRS} public pairs; run the table pairs{PAIRS} with its server-only twin"
        )
    figure, (left, right) = figure_grid(1, 2, width=5.2, height=3.4, title=_TITLE)
    _draw_methods(left, tables[PAIRS])
    _draw_sizes(right, {row: {pairs: rows[row] for pairs, rows in tables.items() if row in rows} for row in BY_SIZE})
    settle_legends(figure)
    return figure


def _by_row(table: str, differences: Iterable[PairedDifference]) -> dict[str, PairedDifference]:
    """Row of the table -> the server's difference."""
    of_server = [item for item in differences if item.figure.startswith("server")]
    # a label is the name of a row's first run, which ends with its seed
    return {re.sub(rf"^{table}-|-\d+$", "", item.comparison.label): item for item in of_server}


def _draw_methods(axes: Axes, rows: Mapping[str, PairedDifference]) -> None:
    ordered = sorted(rows.items(), key=lambda row: row[1].mean)
    for place, (_, item) in enumerate(ordered):
        low, high = item.interval
        axes.plot([low, high], [place, place], color=COLOURS[0], linewidth=2)
        axes.plot(item.mean, place, "o", color=COLOURS[0])
    axes.set_yticks(range(len(ordered)), [LABELS.get(name, name) for name, _ in ordered])
    axes.axvline(0.0, color=GREY, linewidth=1)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set(title=f"{PAIRS} public pairs", xlabel="paired difference, 95 % interval")


def _draw_sizes(axes: Axes, rows: Mapping[str, Mapping[int, PairedDifference]]) -> None:
    for colour, (name, by_size) in zip(COLOURS, rows.items(), strict=False):
        sizes = sorted(by_size)
        ends = [by_size[size].interval for size in sizes]
        axes.plot(sizes, [by_size[size].mean for size in sizes], "o-", color=colour, label=LABELS[name])
        axes.fill_between(sizes, [low for low, _ in ends], [high for _, high in ends], color=colour, alpha=0.18, lw=0)
    axes.axhline(0.0, color=GREY, linewidth=1)
    axes.set(
        title="By public pairs", xlabel="public pairs", xticks=sorted({size for row in rows.values() for size in row})
    )
    legend_below(axes, columns=2)
