"""Maps of samples as the participants of each row represent them, side by side, from what analyses saved in cells."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.lab.analysis.drift_maps import DriftMap, saved_maps
from polyfed.lab.studies.columns.analysis import FOLDER, Analysis
from polyfed.lab.studies.drawings import PointMaps
from polyfed.lab.studies.results import Results
from polyfed.reporting.figures import figure_grid, legend_below, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def draw_points(results: Results, drawing: PointMaps, store: Path) -> Figure:
    """A panel for each row that was run, below each other for each modality; of the first seed at the first point.

    Raises:
        RunError: what a cell has saved is damaged.
    """
    maps = {(each.modality, row): each for row in results.study.rows for each in _maps(results, drawing, row, store)}
    modalities, rows = (list(dict.fromkeys(names)) for names in zip(*maps, strict=True)) if maps else ([""], [""])
    title = f"{results.study.title} (seed {results.study.seeds[0]})"
    figure, axes = figure_grid(len(modalities), len(rows), width=3.6, height=3.6, title=title)
    for where, (modality, row) in zip(axes, product(modalities, rows), strict=True):
        where.set_title(f"{row}: {modality}" if maps else "no cell with a map yet")
        if (modality, row) in maps:
            maps[modality, row].draw(where)
            legend_below(where, 3, markerscale=1.8)
        else:
            where.set_axis_off()
    return figure


def _maps(results: Results, drawing: PointMaps, row: str, store: Path) -> list[DriftMap]:
    study = results.study
    column = study.columns_of(row).get(drawing.points)
    label = ", ".join((row, *study.points_of(row)[0], f"seed {study.seeds[0]}"))
    if label not in results.cells or not isinstance(column, Analysis):
        return []  # not run yet, or not measured in this row
    return saved_maps(store / results.cells[label] / FOLDER, column.stem)
