"""Plots of what crosses in a federation and what it does: drift, weights, features and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyfed.analysis.drift import Drift, ModalityDrift
from polyfed.analysis.fused_features import KINDS, TOGETHER, Features
from polyfed.analysis.round_weights import ChannelWeights, RunWeights
from polyfed.analysis.traffic import DIRECTIONS, Traffic
from polyfed.reporting.figures import (
    COLOURS,
    GREY,
    SEQUENTIAL,
    empty_figure,
    figure_grid,
    legend_below,
    legend_beside,
    styled,
    whole_rounds,
)
from polyfed.reporting.tables import MIB, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^Dv<>P"
_WRITTEN = 12  # cells of a row up to which each has its figure in it
_NAMED_CLASSES = 14
_METHODS = {"tsne": "t-SNE", "pca": "principal components"}


@styled
def draw_drift(found: Drift) -> Figure:
    """A row a modality: a map of the samples, a colour and marker for each client, and CKA of all pairs."""
    rows = len(found.modalities)
    participants = max(len(each.names) for each in found.modalities)
    size = max(4.2, 0.3 * participants)
    title = f"{found.run}: {found.samples} public samples as everybody represents them"
    drawing = empty_figure(2.4 * size + 2, size * rows, title)
    axes = drawing.subplots(rows, 2, squeeze=False)
    for (left, right), each in zip(axes, found.modalities, strict=True):
        _map(left, each)
        left.set_title(f"{each.modality}: {_METHODS[found.method]}")
        _alignment(right, each)
    return drawing


def _map(axes: Axes, found: ModalityDrift) -> None:
    for place, points in zip(found.mapped, found.points, strict=True):
        colour, marker = COLOURS[place % 6], _MARKERS[place // 6 % len(_MARKERS)]
        if place == found.server:
            colour, marker = "black", "x"
        axes.scatter(
            points[:, 0], points[:, 1], s=9, color=colour, marker=marker, linewidths=0.6, label=found.names[place]
        )
    _bare(axes)
    legend_beside(axes, columns=1 + len(found.names) // 20, markerscale=1.8)


def _alignment(axes: Axes, found: ModalityDrift) -> None:
    values = found.alignment.numpy()
    image = axes.imshow(values, vmin=0, vmax=1, cmap=SEQUENTIAL, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="debiased linear CKA", shrink=0.8)
    places = range(len(found.names))
    axes.set_xticks(places, found.names, rotation=90)
    axes.set_yticks(places, found.names)
    axes.set_title(f"{found.modality}: alignment")
    axes.grid(visible=False)
    if len(values) <= _WRITTEN:
        _write(axes, values, 0.5)


@styled
def draw_weights(found: RunWeights) -> Figure:
    """A row a channel: weights of the clients for a few samples, and the mean weight of each client."""
    most = max(len(each.clients) for each in found.channels)
    height = 1.6 + max(2.2, 0.3 * most)
    drawing = empty_figure(12, height * len(found.channels), f"{found.run}: aggregation weights")
    axes = drawing.subplots(len(found.channels), 2, squeeze=False, width_ratios=(3, 2))
    kinds = list(dict.fromkeys(kind for each in found.channels for kind in each.kinds))
    for (left, right), each in zip(axes, found.channels, strict=True):
        _chosen(left, each)
        _client_means(right, each, kinds)
    return drawing


def _chosen(axes: Axes, found: ChannelWeights) -> None:
    values = found.values[:, found.chosen]
    image = axes.imshow(values, aspect="auto", cmap=SEQUENTIAL, vmin=0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="weight")
    axes.set_yticks(range(len(found.clients)), found.clients)
    axes.set(title=f"{found.channel}, round {found.round}", xlabel="recorded public sample")
    axes.grid(visible=False)
    if len(found.chosen) <= _WRITTEN:
        axes.set_xticks(range(len(found.chosen)), [str(place) for place in found.chosen])
        _write(axes, values, float(values.max()) / 2)
    else:
        axes.set_xticks([])


def _client_means(axes: Axes, found: ChannelWeights, kinds: Sequence[str]) -> None:
    shares = found.by_client()
    places = range(len(shares))
    colours = [COLOURS[kinds.index(kind) % len(COLOURS)] for kind in found.kinds]
    axes.barh(places, [share.mean for share in shares.values()], color=colours, height=0.7)
    axes.axvline(1 / len(shares), color=GREY, linestyle=":")
    axes.set_yticks(places, list(shares))
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.set(title="mean over all recorded samples (dotted: equal weights)", xlabel="weight")
    legend_beside(axes, handles=[_patch(COLOURS[kinds.index(kind) % len(COLOURS)], kind) for kind in kinds])


@styled
def draw_features(found: Features) -> Figure:
    """Local, global and fused features, coloured by class, and all three on one map, coloured by kind."""
    drawing = empty_figure(16.5, 4.6, f"{found.run}, client {found.client}: features of its test samples")
    axes = drawing.subplots(1, 4)
    labels = found.labels[found.shown]
    # the classes with most samples have colours, the others are grey
    order = torch.bincount(labels).argsort(descending=True, stable=True).tolist()
    named = [number for number in order if bool((labels == number).any())][:_NAMED_CLASSES]
    for place, kind in zip(axes, KINDS, strict=False):
        each = found.found[kind]
        _classes(place, found.maps[kind], labels, found, sorted(named))
        place.set_title(f"{kind}: silhouette {figure(each.separation.silhouette)}")
    for number, (kind, points) in enumerate(zip(KINDS, found.maps[TOGETHER].chunk(len(KINDS)), strict=True)):
        look: Any = {"color": COLOURS[number], "marker": _MARKERS[number], "label": kind}
        axes[-1].scatter(points[:, 0], points[:, 1], s=7, alpha=0.6, linewidths=0, **look)
    axes[-1].set_title("all three")
    legend_below(axes[-1], columns=3, markerscale=2)
    _bare(axes[-1])
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=7, markerscale=2)
    return drawing


def _classes(axes: Axes, points: Any, labels: Any, found: Features, named: Sequence[int]) -> None:
    rest = ~torch.isin(labels, torch.tensor(named))
    if bool(rest.any()):
        axes.scatter(points[rest, 0], points[rest, 1], s=6, color="#cccccc", label="other classes", zorder=1)
    for place, number in enumerate(named):
        x, y = points[labels == number].unbind(1)
        colour, marker = COLOURS[place % len(COLOURS)], _MARKERS[place // len(COLOURS) % len(_MARKERS)]
        name = found.classes.get(number, str(number))
        axes.scatter(x, y, s=9, color=colour, marker=marker, linewidths=0, label=name, zorder=2)
    _bare(axes)


@styled
def draw_traffic(runs: Sequence[Traffic]) -> Figure:
    """Left the bytes so far, right those of a client in a round, by direction and kind."""
    drawing, (left, right) = figure_grid(1, 2, width=6.0, height=max(3.6, 1.6 + 0.5 * len(runs)), title="Bytes")
    for place, run in enumerate(runs):
        sums = run.cumulative()
        style = "-" if place < len(COLOURS) else "--"
        colour, marker = COLOURS[place % len(COLOURS)], "o" if len(sums) == 1 else ""
        sent = [total / MIB for total in sums.values()]
        left.plot(list(sums), sent, style, color=colour, marker=marker, label=run.label)
    left.set(title="sent so far, both directions", xlabel="round", ylabel="MiB")
    left.set_ylim(bottom=0)
    whole_rounds(left)
    legend_below(left, columns=2)
    _kinds(right, runs)
    return drawing


def _kinds(axes: Axes, runs: Sequence[Traffic]) -> None:
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.by_kind))
    for row, run in enumerate(runs):
        for offset, direction in enumerate(DIRECTIONS):
            start = 0.0
            for kind in run.by_kind:
                width = run.kind_a_round(kind, direction) / MIB
                colour = COLOURS[kinds.index(kind) % len(COLOURS)]
                axes.barh(row + 0.4 * offset - 0.2, width, left=start, height=0.36, color=colour)
                start += width
    names = [f"{run.label}: {direction}" for run in runs for direction in DIRECTIONS]
    axes.set_yticks([row + shift for row in range(len(runs)) for shift in (-0.2, 0.2)], names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set(title="a client and round, by kind", xlabel="MiB")
    handles = [_patch(COLOURS[place % len(COLOURS)], kind) for place, kind in enumerate(kinds)]
    legend_below(axes, columns=3, handles=handles)


def _write(axes: Axes, values: Any, middle: float) -> None:
    """Figures in the cells of a map, dark on those that are bright."""
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            colour = "black" if value > middle else "white"
            axes.text(column, row, figure(float(value)), ha="center", va="center", fontsize=7, color=colour)


def _bare(axes: Axes) -> None:
    """Coordinates on a map mean nothing."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)
