"""Plots of what a model looks like inside: its loss landscape, and the centres of its representations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyfed.analysis.centres import Centres, Picture
from polyfed.analysis.run_landscape import Landscape
from polyfed.reporting.figures import COLOURS, SEQUENTIAL, empty_figure, figure_grid, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv<>P"
_NAMED = 16


@styled
def draw_landscape(found: Landscape) -> Figure:
    """Contours and surface of the loss; the cross is the model itself."""
    drawing = empty_figure(11, 4.4, title=f"{found.run}, round {found.round}: loss on {found.samples} of {found.data}")
    left, right = drawing.add_subplot(1, 2, 1), drawing.add_subplot(1, 2, 2, projection="3d")
    axis, values = found.axis.numpy(), found.values.numpy()
    names = [f"along eigenvector {k + 1} ({float(value):.3g})" for k, value in enumerate(found.pairs.values)]
    # rows of values belong to the first direction, columns to the second; matplotlib has rows upwards
    filled = left.contourf(axis, axis, values.T, levels=20, cmap=SEQUENTIAL)
    left.contour(axis, axis, values.T, levels=10, colors="white", linewidths=0.4)
    left.plot([0], [0], "x", color="white")
    left.set(title="contours", xlabel=names[0], ylabel=names[1])
    left.grid(visible=False)
    drawing.colorbar(filled, ax=left, label="loss")
    _surface(right, found)
    return drawing


def _surface(axes: Any, found: Landscape) -> None:
    import numpy as np

    grid: tuple[object, ...] = np.meshgrid(found.axis.numpy(), found.axis.numpy(), indexing="ij")
    surface = axes.plot_surface(*grid, found.values.numpy(), cmap=SEQUENTIAL, linewidth=0, antialiased=True)
    surface.set_rasterized(True)
    axes.set(title="surface", xlabel="first", ylabel="second", zlabel="loss")


@styled
def draw_centres(runs: Sequence[Centres]) -> Figure:
    """LDA projections, a column for each run and a row for each modality; small marks are samples, large ones centres.

    The marker tells the modality and the colour the data set (or class), the same in all runs.
    """
    titles = tuple(dict.fromkeys(title for found in runs for title in found.pictures))
    drawing, axes = figure_grid(len(titles), len(runs), title="Representations, projected by LDA")
    look = _Look.of(runs)
    for row, title in enumerate(titles):
        for place, found in zip(axes[row * len(runs) :], runs, strict=False):
            place.set_title(f"{found.run}, round {found.round}: {title}")
            place.set(xlabel="first axis", ylabel="second axis")
            if title in found.pictures:
                _draw_picture(place, found, found.pictures[title], look)
            else:
                place.set_axis_off()
    if len(look.names) <= _NAMED:
        drawing.legend(*_handles(axes), loc="outside lower left", ncols=min(4, len(look.names)))
    return drawing


@dataclass(frozen=True)
class _Look:
    """Groups of all runs, the colour of each data set or class, and the marker of each modality."""

    names: tuple[str, ...]
    colours: Mapping[str, str]
    markers: Mapping[str, str]

    @classmethod
    def of(cls, runs: Sequence[Centres]) -> _Look:
        names = tuple(dict.fromkeys(name for found in runs for name in found.names))
        sets = dict.fromkeys(_without_modality(name) for name in names)
        modalities = dict.fromkeys(modality for found in runs for modality in found.modalities)
        colours = {name: COLOURS[k % len(COLOURS)] for k, name in enumerate(sets)}
        return cls(names, colours, {name: _MARKERS[k % len(_MARKERS)] for k, name in enumerate(modalities)})


def _draw_picture(axes: Axes, found: Centres, picture: Picture, look: _Look) -> None:
    for k, centre in zip(picture.groups, picture.places, strict=True):
        name = found.names[k]
        colour, marker = look.colours[_without_modality(name)], look.markers[found.modalities[k]]
        own, (x, y) = picture.points[picture.labels == k].numpy(), centre.tolist()
        axes.scatter(own[:, 0], own[:, 1], s=8, color=colour, marker=marker, alpha=0.35, linewidths=0)
        axes.scatter([x], [y], s=110, color=colour, marker=marker, edgecolors="black", linewidths=1, label=name)


def _handles(axes: Sequence[Axes]) -> tuple[list[Any], list[str]]:
    """One legend entry a group, from the first axes that shows it."""
    known = {label: handle for each in axes for handle, label in zip(*each.get_legend_handles_labels(), strict=True)}
    return list(known.values()), list(known)


def _without_modality(name: str) -> str:
    return name.partition(": ")[2]
