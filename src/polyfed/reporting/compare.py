"""Comparison of runs: final and best metrics, bytes and time, with mean and spread over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import ConfigError, nearest
from polyfed.reporting.client_spread import client_spread, latest_values
from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, save, styled, whole_rounds
from polyfed.reporting.tables import MIB, TextTable, figure
from polyfed.runs.records import SERVER, RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PREFERRED = ("r1_sum", "accuracy")
KINDS = ("test", "validation")
SEED_KEYS = ("run.seed",)
LABEL_KEYS = ("name", "description")
_OF_CLIENTS = ("worst", "disparity")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; the latter is NaN for a single seed."""

    mean: float
    std: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Over the finite ones among ``values``."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(fmean(finite) if finite else math.nan, stdev(finite) if len(finite) > 1 else math.nan)

    def __str__(self) -> str:
        return figure(self.mean) + ("" if math.isnan(self.std) else f" ± {figure(self.std)}")


@dataclass(frozen=True)
class Comparison:
    """Runs that differ only by their seed, taken together.

    Attributes:
        label: name of the first of the runs.
        runs: the runs.
        figures: what is compared -> its value over the runs; NaN where no run has it.
    """

    label: str
    runs: tuple[RunRecords, ...]
    figures: Mapping[str, Spread]


def compare(runs: Sequence[RunRecords], metric: str | None = None, kind: str = "test") -> list[Comparison]:
    """One entry a configuration, in order of appearance.

    Args:
        runs: records of the runs.
        metric: metric of the server and the clients; by default ``r1_sum`` or ``accuracy``, what each has.
        kind: ``test`` or ``validation``.

    Raises:
        ConfigError: nobody in any of the runs has the metric, or no such kind.
    """
    _require_known(runs, metric, kind)
    groups: dict[str, list[RunRecords]] = {}
    for run in runs:
        groups.setdefault(_identity(run), []).append(run)
    figures = [[_figures(run, metric, kind) for run in group] for group in groups.values()]
    names = dict.fromkeys(name for group in figures for run in group for name in run)
    return [
        Comparison(
            group[0].name,
            tuple(group),
            {n: Spread.of([run.get(n, math.nan) for run in found]) for n in names},
        )
        for group, found in zip(groups.values(), figures, strict=True)
    ]


def _require_known(runs: Sequence[RunRecords], metric: str | None, kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind}: {nearest(kind, KINDS)}")
    known = {
        name for run in runs for participant in (SERVER, *run.clients) for name in run.metric_names(participant, kind)
    }
    if metric is not None and metric not in known:
        raise ConfigError(f"--metric {metric}: nobody has it in these runs; {nearest(metric, known)}")


def comparison_rows(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Plain rows, for JSON or a data frame: ``<figure>`` is the mean, ``<figure> std`` its spread."""
    return [
        {"run": item.label, "seeds": len(item.runs)}
        | {name: spread.mean for name, spread in item.figures.items()}
        | {f"{name} std": spread.std for name, spread in item.figures.items()}
        for item in comparisons
    ]


def comparison_table(comparisons: Sequence[Comparison]) -> TextTable:
    """The comparison as a table, the highest first figure at the top."""
    known = list(comparisons[0].figures) if comparisons else []
    names = [name for name in known if not any(name == f"{mean} {extra}" for mean in known for extra in _OF_CLIENTS)]
    ordered = _ordered(comparisons)
    body = [(item.label, str(len(item.runs)), *(str(item.figures[name]) for name in names)) for item in ordered]
    notes = (
        "± is the standard deviation over runs whose configurations differ only by their seed.",
        "Best: highest over rounds of the metric shown, so it leans upwards; final: after the last round.",
    )
    return TextTable("Comparison", ("run", "seeds", *names), body, notes)


def clients_comparison_table(comparisons: Sequence[Comparison]) -> TextTable:
    """Mean, worst client and disparity of each group of several clients, one row a run and group."""
    body = [
        (f"{item.label}: {name}", str(item.figures[name]), *(str(item.figures[f"{name} {x}"]) for x in _OF_CLIENTS))
        for item in _ordered(comparisons)
        for name in item.figures
        if f"{name} {_OF_CLIENTS[0]}" in item.figures
    ]
    notes = ("Over the clients of a group: mean, worst client, and highest minus lowest value (disparity).",)
    return TextTable("Clients", ("run: group", "mean", *_OF_CLIENTS), body, notes)


@styled
def draw_comparison(
    comparisons: Sequence[Comparison], path: Path, metric: str | None = None, kind: str = "test"
) -> Path:
    """Draw the metric by round and by MiB sent as a PNG, a row for the server and each group of clients.

    Lines are means over seeds, bands one standard deviation, a group's value the mean of its clients.
    """
    runs = [run for item in comparisons for run in item.runs]
    participants = {SERVER: (SERVER,)} | {group: clients for run in runs for group, clients in run.groups.items()}
    names = {participant: metric or _metric_of(runs, members, kind) for participant, members in participants.items()}
    known = [
        participant
        for participant in participants
        if any(_curve(run, participant, names[participant], kind) for run in runs)
    ]
    drawing, axes = figure_grid(max(1, len(known)), 2)
    for participant, left, right in zip(known, axes[::2], axes[1::2], strict=False):
        for item, colour in zip(comparisons, cycle(COLOURS), strict=False):
            curve = _mean_curve([_curve(run, participant, names[participant], kind) for run in item.runs])
            sent = _mean_curve([_sent(run) for run in item.runs])
            _draw_band(left, list(curve), list(curve.values()), item.label, colour)
            both = [number for number in curve if number in sent]
            _draw_band(right, [sent[n].mean for n in both], [curve[n] for n in both], item.label, colour)
        ylabel = f"{participant} {kind} {names[participant]}"
        left.set(title=f"{participant}: by round", xlabel="round", ylabel=ylabel)
        right.set(title=f"{participant}: by communication", xlabel="MiB sent, both directions", ylabel=ylabel)
        whole_rounds(left)
    legend_below(axes[0], columns=3)
    return save(drawing, path)


def _curve(run: RunRecords, participant: str, metric: str, kind: str) -> dict[int, float]:
    """Round -> the server's value, or the mean over a group of its clients' latest values."""
    if participant == SERVER:
        return run.series(SERVER, metric, kind)
    series = [run.series(client, metric, kind) for client in run.groups.get(participant, ())]
    return {n: fmean(latest_values(series, n)) for n in sorted({n for values in series for n in values})}


def _identity(run: RunRecords) -> str:
    """Equal for runs whose configurations differ only by seed and label; unique for a run without one."""
    config = json.loads(json.dumps(run.config, default=str))
    for path in (*SEED_KEYS, *LABEL_KEYS):
        *parents, last = path.split(".")
        node: Any = config
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    return json.dumps(config, sort_keys=True) if run.config else str(run.folder.resolve())


def _figures(run: RunRecords, metric: str | None, kind: str) -> dict[str, float]:
    server = metric or _metric_of([run], [SERVER], kind)
    best = run.best(SERVER, server, kind)
    found = {
        f"server {server} final": run.last(SERVER, kind).get(server, math.nan),
        f"server {server} best": best[1] if best else math.nan,
    }
    for group, clients in run.groups.items():
        spread = client_spread(run, group, metric or _metric_of([run], clients, kind), kind)
        found[f"{group} {spread.metric}"] = spread.mean
        if len(clients) > 1:
            figures = zip(_OF_CLIENTS, (spread.worst, spread.disparity), strict=True)
            found |= {f"{group} {spread.metric} {extra}": value for extra, value in figures}
    found |= {"MiB": run.total_bytes() / MIB, "seconds": sum(run.seconds.values())}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _metric_of(runs: Sequence[RunRecords], participants: Sequence[str], kind: str) -> str:
    """The main metric of some participants: the first of the preferred ones that any of them has."""
    known = {name for run in runs for participant in participants for name in run.metric_names(participant, kind)}
    return next((name for name in PREFERRED if name in known), PREFERRED[0])


def _ordered(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The highest first figure at the top."""
    return sorted(comparisons, key=lambda item: -_first(item))


def _first(item: Comparison) -> float:
    value = next(iter(item.figures.values()), Spread(math.nan)).mean
    return -math.inf if math.isnan(value) else value


def _sent(run: RunRecords) -> dict[int, float]:
    """Round -> MiB sent up to and including it."""
    rounds = range(1, run.rounds + 1)
    down, up = run.bytes_per_round("down"), run.bytes_per_round("up")
    totals = accumulate(down.get(number, 0) + up.get(number, 0) for number in rounds)
    return {number: total / MIB for number, total in zip(rounds, totals, strict=True)}


def _mean_curve(series: Sequence[Mapping[int, float]]) -> dict[int, Spread]:
    """Round -> spread over the runs that have it."""
    rounds = sorted({number for values in series for number in values})
    return {number: Spread.of([values[number] for values in series if number in values]) for number in rounds}


def _draw_band(axes: Axes, x: Sequence[float], y: Sequence[Spread], label: str, colour: str) -> None:
    axes.plot(x, [spread.mean for spread in y], color=colour, label=label, marker="o", markersize=3)
    stds = [0.0 if math.isnan(spread.std) else spread.std for spread in y]
    low = [spread.mean - std for spread, std in zip(y, stds, strict=True)]
    high = [spread.mean + std for spread, std in zip(y, stds, strict=True)]
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
