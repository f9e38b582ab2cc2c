"""Metrics by round: the server's with chance, and the clients' by group with their spread."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from polyfed.reporting.figures import COLOURS, GREY, figure_grid, legend_below, styled, whole_rounds
from polyfed.reporting.recalls import Recall, find_recalls, is_context
from polyfed.reporting.tables import count
from polyfed.runs.records import SERVER, RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = {"test": "-", "validation": "--"}
_COLUMNS = 3
Series = Mapping[int, float]


@dataclass(frozen=True)
class _Panel:
    """One pair of axes: metric name -> label of its lines, and label -> chance."""

    title: str
    ylabel: str
    metrics: Mapping[str, str]
    chance: Mapping[str, float] = field(default_factory=dict)


@styled
def draw_server(records: RunRecords) -> Figure | None:
    """The server's recalls (solid: test, dashed: validation, dotted: chance) and other metrics."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    recalls = find_recalls(metrics)
    panels = [*_recall_panels(recalls), *_other_panels(metrics, recalls)]
    if not panels:
        return None
    columns = min(_COLUMNS, len(panels))
    figure, axes = figure_grid(-(-len(panels) // columns), columns, title=f"{records.name}: server")
    for place, panel in zip(axes, panels, strict=False):
        _draw_panel(place, panel, records)
    for empty in axes[len(panels) :]:
        empty.set_axis_off()
    return figure


@styled
def draw_clients(records: RunRecords) -> Figure | None:
    """Each group's main test metric by round: every client, their mean, and the range of all."""
    series = {group: _main_series(records, clients) for group, clients in records.groups.items()}
    known = {group: found for group, found in series.items() if found[1]}
    if not known:
        return None
    figure, axes = figure_grid(1, len(known), title=f"{records.name}: clients, test")
    for place, (group, (metric, values)) in zip(axes, known.items(), strict=True):
        _draw_group(place, list(values.values()))
        place.set(title=f"{group} ({len(values)} measured)", xlabel="round", ylabel=_unit(metric))
        whole_rounds(place)
    legend_below(axes[0], columns=3)
    return figure


def _recall_panels(recalls: Sequence[Recall]) -> list[_Panel]:
    groups: dict[tuple[str, str], list[Recall]] = {}
    for recall in recalls:
        groups.setdefault((recall.direction, recall.protocol), []).append(recall)
    return [_recall_panel(group) for group in groups.values()]


def _recall_panel(recalls: Sequence[Recall]) -> _Panel:
    first = recalls[0]
    protocol = f" ({first.protocol})" if first.protocol else ""
    return _Panel(
        title=f"{first.direction}{protocol}, gallery {count(first.gallery)}",
        ylabel="recall (%)",
        metrics={recall.name: f"R@{recall.cutoff}" for recall in recalls},
        chance={recall.name: recall.chance for recall in recalls if not math.isnan(recall.chance)},
    )


def _other_panels(metrics: Mapping[str, float], recalls: Sequence[Recall]) -> list[_Panel]:
    known = {recall.name for recall in recalls}
    names = [name for name in metrics if name not in known and not is_context(name)]
    alone = [name for name in names if name in ("loss", "r1_sum")]
    together = {name: name for name in names if name not in alone}
    panels = [_Panel("classification", "metric (%)", together)] if together else []
    firsts = sum(recall.chance for recall in recalls if recall.cutoff == 1)
    chance = {"r1_sum": firsts} if firsts > 0 else {}
    return panels + [_Panel(name, _unit(name), {name: name}, chance) for name in alone]


def _unit(metric: str) -> str:
    """Axis label: a loss has no unit, the metrics of tasks are in percent."""
    return metric if metric == "loss" else f"{metric} (%)"


def _draw_panel(axes: Axes, panel: _Panel, records: RunRecords) -> None:
    for number, (metric, label) in enumerate(panel.metrics.items()):
        colour = COLOURS[number % len(COLOURS)]
        for kind, style in _STYLES.items():
            series = records.series(SERVER, metric, kind)
            if series:
                axes.plot(*_points(series), style, color=colour, marker=_marker(series))
        axes.plot([], [], color=colour, label=label)
        if metric in panel.chance:
            axes.axhline(panel.chance[metric], color=colour, linestyle=":", linewidth=1)
    for kind, style in _STYLES.items():
        if any(records.series(SERVER, metric, kind) for metric in panel.metrics):
            axes.plot([], [], style, color=GREY, label=kind)
    if not panel.chance.keys().isdisjoint(panel.metrics):
        axes.plot([], [], ":", color=GREY, label="chance")
    axes.set(title=panel.title, xlabel="round", ylabel=panel.ylabel)
    legend_below(axes, columns=5)
    whole_rounds(axes)


def latest_values(series: Sequence[Series], until: int) -> list[float]:
    """Each client's latest value up to a round: not every client is measured in every round."""
    past = [[value for number, value in values.items() if number <= until] for values in series]
    return [values[-1] for values in past if values]


def _main_series(records: RunRecords, clients: Sequence[str]) -> tuple[str, dict[str, Series]]:
    """The group's main metric, and the series of the clients that have it."""
    names = dict.fromkeys(name for client in clients for name in records.metric_names(client))
    shown = [name for name in names if not is_context(name)]
    metric = next((name for name in ("r1_sum", "accuracy") if name in names), shown[0] if shown else "")
    series = {client: records.series(client, metric) for client in clients}
    return metric, {client: values for client, values in series.items() if values}


def _draw_group(axes: Axes, series: Sequence[Series]) -> None:
    for values in series:
        axes.plot(*_points(values), color=GREY, linewidth=0.8, alpha=0.6)
    rounds = sorted({number for values in series for number in values})
    latest = [latest_values(series, number) for number in rounds]
    lows, highs = [min(values) for values in latest], [max(values) for values in latest]
    axes.fill_between(rounds, lows, highs, color=COLOURS[0], alpha=0.15, linewidth=0, label="range")
    means = [fmean(values) for values in latest]
    axes.plot(rounds, means, color=COLOURS[0], linewidth=2.2, label="mean (latest of each client)")
    axes.plot([], [], color=GREY, linewidth=0.8, label="one client")


def _points(series: Series) -> tuple[list[int], list[float]]:
    return list(series), list(series.values())


def _marker(series: Series) -> str:
    return "o" if len(series) == 1 else ""
