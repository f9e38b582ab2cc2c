"""Comparison of runs: final and best metrics, bytes and time over seeds, and differences paired by seed."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.extras import brought_by
from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, save, styled, svg_text, whole_rounds
from polyfed.reporting.metrics import EVALUATIONS, judged_by, main_metric
from polyfed.reporting.page import page_templates
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample, finite_mean, spread_of, values_by_round
from polyfed.reporting.summary import RunSummary
from polyfed.reporting.tables import MIB, Cell, TextTable, format_number, span_of
from polyfed.runs.records import SERVER, RunRecords

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABELS = (("run", "seed"), ("name",), ("description",))  # settings in which runs of one configuration may differ
_OF_CLIENTS = ("worst", "disparity")


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; the latter is NaN for a single seed."""

    mean: float
    std: float = math.nan

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of the finite values."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(finite_mean(finite) if finite else math.nan, spread_of(finite))

    def __str__(self) -> str:
        return format_number(self.mean) + ("" if math.isnan(self.std) else f" ± {format_number(self.std)}")


_Curve = Mapping[int, Spread]
"""Round -> value over seeds."""


@dataclass(frozen=True)
class Comparison:
    """Runs that differ only by their seed.

    Attributes:
        label: Name of the first run.
        runs: Records of the runs.
        metrics: Compared figure -> its spread over the runs; NaN where no run has it.
    """

    label: str
    runs: tuple[RunRecords, ...]
    metrics: Mapping[str, Spread]

    @property
    def rounds(self) -> list[int]:
        """Round of the server's model in each run whose server was evaluated."""
        return [run.chosen.number for run in self.runs if any(run.metric_names(SERVER, split) for split in EVALUATIONS)]


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Runs next to each other, those that differ only by their seed as one; result of ``polyfed.compare``.

    A notebook shows its tables and its figure, ``print`` its tables.

    Attributes:
        entries: Configurations, in order of appearance.
        metric: Metric of the server and the clients; None for the main metric of each.
        split: ``test`` or ``validation``.
        reference: Configuration that paired differences are against; None without any run.
    """

    entries: Sequence[Comparison]
    metric: str | None = None
    split: str = "test"
    reference: Comparison | None = None

    @classmethod
    def of(
        cls, runs: Sequence[RunRecords], metric: str | None = None, split: str = "test", against: str | None = None
    ) -> RunComparison:
        """Comparison of runs.

        Args:
            runs: Records of the runs.
            metric: See the attribute.
            split: See the attribute.
            against: Name or folder of a run of the reference; None for the first configuration.

        Raises:
            ConfigError: No participant of any run has the metric, the split is unknown, or no run has the name.
        """
        if split not in EVALUATIONS:
            raise ConfigError(f"'{split}' is not a split of evaluations; {nearest(split, EVALUATIONS)}")
        known = {name for run in runs for who in (SERVER, *run.clients) for name in run.metric_names(who, split)}
        if metric is not None and metric not in known:
            raise ConfigError(f"no participant of these runs has a metric '{metric}'; {nearest(metric, known)}")
        alike: dict[str, list[tuple[RunRecords, dict[str, float]]]] = {}
        for run in runs:
            alike.setdefault(_configuration(run), []).append((run, _compared(run, metric, split)))
        names = dict.fromkeys(name for seeds in alike.values() for _, values in seeds for name in values)
        entries = [
            Comparison(
                seeds[0][0].name,
                tuple(run for run, _ in seeds),
                {name: Spread.of([values.get(name, math.nan) for _, values in seeds]) for name in names},
            )
            for seeds in alike.values()
        ]
        return cls(entries, metric, split, _named(entries, against) if entries else None)

    # ---- tables

    @property
    def tables(self) -> list[TextTable]:
        """All tables that have rows: the runs, their clients, and paired differences."""
        tables = (self.table, self._clients_table, self._differences_table)
        return [table for table in tables if table.rows]

    @property
    def table(self) -> TextTable:
        """The runs, the highest first metric at the top."""
        metrics = list(self.entries[0].metrics) if self.entries else []
        of_clients = {f"{name} {extra}" for name in metrics for extra in _OF_CLIENTS}
        names = [name for name in metrics if name not in of_clients]
        ordered = self._ordered
        rows: list[dict[str, Cell]] = [
            {
                "run": item.label,
                "seeds": len(item.runs),
                "round": ", ".join(map(str, item.rounds)) or None,
                **{name: str(item.metrics[name]) for name in names},
            }
            for item in ordered
        ]
        measured = [number for item in ordered for run in item.runs for number in run.last_rounds(run.clients)]
        last = ", ".join(run.name for item in ordered if item.rounds for run in item.runs if not run.chosen.metric)
        last = last and f" (the last, without validation: {last})"
        of_round = f" (round {span_of(measured)})" if measured else ""
        notes = [
            "± is the standard deviation over runs whose configurations differ only by their seed.",
            f"Round: of the server's model, the best on validation{last}. "
            f"Clients: after their own last evaluation{of_round}.",
        ]
        if len(self.entries) == 1:
            run = self.entries[0].runs[0]
            twin = RunSummary(run).baseline(run.folder) or ("give another run", "its twin, or another seed")
            notes.append(f"A single configuration has no counterpart; {': '.join(twin)}.")
        return TextTable.of("Comparison", rows, notes)

    @property
    def _clients_table(self) -> TextTable:
        """Mean, worst client and disparity of each group of several clients, one row per run and group."""
        rows = [
            {"run: group": f"{item.label}: {name}", "mean": str(item.metrics[name])}
            | {extra: str(item.metrics[f"{name} {extra}"]) for extra in _OF_CLIENTS}
            for item in self._ordered
            for name in item.metrics
            if f"{name} {_OF_CLIENTS[0]}" in item.metrics
        ]
        notes = ("Over the clients of a group: mean, worst client, and highest minus lowest value (disparity).",)
        return TextTable.of("Clients", rows, notes)

    @property
    def _differences_table(self) -> TextTable:
        """The differences as a table, one row per configuration and metric."""
        rows: list[dict[str, Cell]] = [
            {
                "run: metric": f"{item.comparison.label}: {item.metric}",
                "seeds": len(item.by_seed),
                "mean": f"{item.mean:+.2f}",
                "std": item.std,
                "95 % interval": None if math.isnan(item.std) else "{:+.2f} to {:+.2f}".format(*item.interval),
                "smallest": f"{item.smallest:+.2f}",
            }
            for item in self.differences
        ]
        shown = {id(part) for item in self.differences for part in (item.comparison, item.reference)}
        apart = ", ".join(item.label for item in self.entries if id(item) not in shown)
        fewest = min((len(item.by_seed) for item in self.differences), default=FEWEST_SEEDS)
        notes = {
            "Run minus reference of one seed. Interval: Student's t over the differences. Smallest: the lowest.": True,
            f"No seed, or no metric, in common with the reference: {apart}.": apart,
            "One common seed has no spread and no interval: at least two are needed.": fewest < 2,
            f"Differences over fewer than {FEWEST_SEEDS} seeds prove nothing.": fewest < FEWEST_SEEDS,
        }
        title = f"Paired differences against {self.reference.label if self.reference else ''}"
        return TextTable.of(title, rows, [note for note, holds in notes.items() if holds])

    @property
    def _ordered(self) -> list[Comparison]:
        first = {id(item): next(iter(item.metrics.values()), Spread(math.nan)).mean for item in self.entries}
        return sorted(self.entries, key=lambda item: (math.isnan(first[id(item)]), -first[id(item)]))

    def to_json(self) -> list[dict[str, Any]]:
        """One plain row per configuration: ``<metric>`` is the mean, ``<metric> std`` its spread, ``rounds`` those of
        the server's models, ``paired_differences`` those against the reference."""
        return [
            {"run": item.label, "seeds": len(item.runs), "rounds": item.rounds}
            | {name: spread.mean for name, spread in item.metrics.items()}
            | {f"{name} std": spread.std for name, spread in item.metrics.items()}
            | {"paired_differences": [one.to_json() for one in self.differences if one.comparison is item]}
            for item in self.entries
        ]

    def to_pandas(self, table: Literal["runs", "differences"] = "runs") -> pd.DataFrame:
        """A pandas frame (extra ``frames``), by default the rows of ``to_json``.

        Args:
            table: ``runs``, one row per configuration, or ``differences``, one per configuration and metric.

        Raises:
            ConfigError: The table does not exist, or pandas is not installed.
        """
        frames = {
            "runs": self.to_json(),
            "differences": [{"run": one.comparison.label, **one.to_json()} for one in self.differences],
        }
        if table not in frames:
            raise ConfigError(f"to_pandas: no table '{table}'; {nearest(table, frames)}")
        with brought_by("frames"):
            import pandas as pd

        return pd.DataFrame(frames[table]).drop(columns="paired_differences", errors="ignore")

    # ---- paired differences over common seeds

    @cached_property
    def differences(self) -> Sequence[PairedDifference]:
        """Each configuration against the reference, for the server and each group of clients, where they share seeds.

        The server's metric is that of the run's model (``RunRecords.chosen``); a group's is the mean of its clients'
        last values. Of two runs with one seed the later given counts.
        """
        if self.reference is None:
            return []

        def by_seed(item: Comparison) -> dict[int, dict[str, float]]:
            seeds = [(run, run.number("seed")) for run in item.runs]
            return {seed: _judged(run, self.metric, self.split) for run, seed in seeds if seed is not None}

        others, paired = by_seed(self.reference), list[PairedDifference]()
        for item in (item for item in self.entries if item is not self.reference):
            differences: dict[str, dict[int, float]] = {}
            for seed, own in by_seed(item).items():
                for name, value in own.items():
                    if math.isfinite(difference := value - others.get(seed, {}).get(name, math.nan)):
                        differences.setdefault(name, {})[seed] = difference
            paired += [PairedDifference(seeds, item, self.reference, name) for name, seeds in differences.items()]
        return paired

    # ---- figure

    @cached_property
    @styled
    def figure(self) -> Figure:
        """The metric by round and by MiB sent, a row for the server and each group of clients.

        Lines are means over seeds, bands one standard deviation; a group's value is the mean of its clients.
        """
        rows = _curves(self.entries, self.metric, self.split)
        sent = [_seeds(map(_mib_sent, item.runs)) for item in self.entries]
        drawing, axes = figure_grid(max(1, len(rows)), 2)
        for (participant, (name, curves)), left, right in zip(rows.items(), axes[::2], axes[1::2], strict=False):
            _draw_row(left, right, [item.label for item in self.entries], curves, sent)
            ylabel = f"{participant} {self.split} {name}"
            left.set(title=f"{participant}: by round", xlabel="round", ylabel=ylabel)
            right.set(title=f"{participant}: by communication", xlabel="MiB sent, both directions", ylabel=ylabel)
            whole_rounds(left)
        legend_below(axes[0], columns=3)
        return drawing

    def save(self, path: Path | str) -> Path:
        """Write the figure as a PNG file, complete or not at all; returns the path."""
        return save(self.figure, Path(path))

    # ---- what shows it

    def _repr_html_(self) -> str:
        parts: Any = page_templates().get_template("parts.html.j2").module
        return f"{parts.tables(self.tables)}{svg_text(self.figure, 'Comparison of runs')}"

    def __repr__(self) -> str:
        from polyfed.reporting.terminal import Terminal

        Terminal(file=(stream := io.StringIO())).print_tables(self.tables)
        return stream.getvalue()


def _configuration(run: RunRecords) -> str:
    """Key that is equal for runs whose configurations differ only by seed and label; unique without a configuration."""
    config = copy.deepcopy(dict(run.config))
    for *sections, key in _LABELS:
        section: Any = config
        for name in sections:
            section = section.get(name)
        if isinstance(section, dict):
            section.pop(key, None)
    return json.dumps(config, sort_keys=True, default=str) if run.config else str(run.folder.resolve())


def _compared(run: RunRecords, metric: str | None, split: str) -> dict[str, float]:
    groups = judged_by(run, metric, split)[1].items()
    several = [(f"{group} {spread.metric}", spread) for group, spread in groups if spread.clients > 1]
    metrics = _judged(run, metric, split)
    metrics |= {f"{name} {extra}": getattr(spread, extra) for name, spread in several for extra in _OF_CLIENTS}
    metrics |= {"MiB": run.total_bytes() / MIB, "seconds": sum(run.seconds.values())}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _judged(run: RunRecords, metric: str | None, split: str) -> dict[str, float]:
    """Metric of the server's model, and mean of each group's clients after their last evaluation."""
    server, groups = judged_by(run, metric, split)
    means = {f"{group} {spread.metric}": spread.mean for group, spread in groups.items()}
    return {f"server {server}": run.metrics(SERVER, split).get(server, math.nan), **means}


# ---- curves


def _curves(comparisons: Sequence[Comparison], metric: str | None, split: str) -> dict[str, tuple[str, list[_Curve]]]:
    """The server and each measured group -> its metric, and the curve of every entry."""
    runs = [run for item in comparisons for run in item.runs]
    rows = {}
    for participant in dict.fromkeys([SERVER, *chain.from_iterable(run.groups for run in runs)]):
        of_runs = (main_metric(run, {SERVER: (SERVER,), **run.groups}.get(participant, ()), split) for run in runs)
        name = metric or next(filter(None, of_runs), "")
        curves = [_seeds(_curve(run, participant, name, split) for run in item.runs) for item in comparisons]
        if any(map(len, curves)):
            rows[participant] = name, curves
    return rows


def _draw_row(left: Axes, right: Axes, labels: Sequence[str], curves: Sequence[_Curve], sent: Sequence[_Curve]) -> None:
    for label, curve, mib, colour in zip(labels, curves, sent, cycle(COLOURS), strict=False):
        common = {mib[number].mean: value for number, value in curve.items() if number in mib}
        for axes, points in ((left, curve), (right, common)):
            means = [value.mean for value in points.values()]
            reach = [0.0 if math.isnan(value.std) else value.std for value in points.values()]
            low, high = ([mean + sign * std for mean, std in zip(means, reach, strict=True)] for sign in (-1, 1))
            axes.plot(list(points), means, color=colour, label=label, marker="o", markersize=3)
            axes.fill_between(list(points), low, high, color=colour, alpha=0.18, linewidth=0)


def _curve(run: RunRecords, participant: str, metric: str, split: str) -> dict[int, float]:
    series = [run.series(member, metric, split) for member in {SERVER: (SERVER,), **run.groups}.get(participant, ())]
    # not every client is measured in every round
    return {number: finite_mean(values) for number, values in values_by_round(series, carry=True).items()}


def _mib_sent(run: RunRecords) -> dict[int, float]:
    up, down = run.bytes_per_round("up"), run.bytes_per_round("down")
    rounds = range(1, run.rounds + 1)
    return dict(zip(rounds, accumulate((up.get(k, 0) + down.get(k, 0)) / MIB for k in rounds), strict=True))


def _seeds(curves: Iterable[Mapping[int, float]]) -> _Curve:
    return {number: Spread.of(values) for number, values in values_by_round(curves, carry=False).items()}


# ---- paired differences over common seeds


@dataclass(frozen=True)
class PairedDifference(PairedSample):
    """One metric of a configuration minus that of the reference, for seeds with finite values of both.

    Attributes:
        comparison: The configuration.
        reference: The reference.
        metric: Name of the metric.
    """

    comparison: Comparison
    reference: Comparison
    metric: str

    def to_json(self) -> dict[str, Any]:
        """Figures for JSON; null where a single seed has none."""
        known = not math.isnan(self.std)
        return {
            "figure": self.metric,
            "against": self.reference.label,
            "seeds": sorted(self.by_seed),
            "mean": self.mean,
            "std": self.std if known else None,
            "interval_95": list(self.interval) if known else None,
            "smallest": self.smallest,
        }


def _named(comparisons: Sequence[Comparison], name: str | None) -> Comparison:
    if name is None:
        return comparisons[0]
    named = [item for item in comparisons if any(name in (run.name, str(run.folder)) for run in item.runs)]
    if not named:
        names = [run.name for item in comparisons for run in item.runs]
        raise ConfigError(f"no run '{name}' here to compare against; {nearest(name, names)}")
    if len(named) > 1:
        raise ConfigError(f"{len(named)} configurations have a run '{name}' to compare against; give its folder")
    return named[0]
