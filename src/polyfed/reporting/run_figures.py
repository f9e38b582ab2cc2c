"""Figures of a run, for its report and, as PNG files, for ``plots/`` in its folder: eight kinds of charts.

By round: recalls of the server, its other metrics, values that the method recorded, metrics of clients, and bytes. By
name: the federation and training alone, items by class, and sizes of the clients' data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from polyfed.reporting import run_tables
from polyfed.reporting.charts import (
    BarPart,
    BarRows,
    Chart,
    ChartBand,
    ChartLine,
    CountMap,
    FigureSheet,
    LegendEntry,
    RoundChart,
    RoundSeries,
    sheet_of,
    stacked_chart,
)
from polyfed.reporting.figures import COLOURS
from polyfed.reporting.metrics import Recall, chance_of, find_recalls, main_metric, recalls_and_others
from polyfed.reporting.statistics import finite_mean, finite_values, values_by_round
from polyfed.reporting.summary import PairedResult, RunSummary
from polyfed.reporting.tables import MIB, count, format_number
from polyfed.runs.records import SERVER, RunRecords

_THIN_LINES = 20  # clients up to which each has its own line
_DASHES = {"test": "solid", "validation": "dashed", "chance": "dotted"}
_MOST_BARS = 60  # clients of a group up to which each has its own bar
_MOST_BELOW = 8  # classes of a map up to which their names stand below it, where clients are fewer
_MOST_COLUMNS = 200  # classes of a map


def run_figures(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of a figure -> its charts; figures without recorded data are left out."""
    sent = {
        label: {number: total / MIB for number, total in records.bytes_per_round(direction).items()}
        for direction, label in run_tables.BYTE_DIRECTIONS.items()
    }
    traffic = stacked_chart(f"Sent per round (total {records.total_bytes() / MIB:,.1f} MiB)", "MiB", sent)
    sheets = {
        "gain": sheet_of(f"{records.name}: alone and in the federation", paired_bars(RunSummary(records).results)),
        "server": sheet_of(f"{records.name}: server", _informative(server_charts(records))),
        "recorded": sheet_of(f"{records.name}: recorded by the method", _informative(recorded_charts(records))),
        "clients": sheet_of(f"{records.name}: clients, test", _informative(client_charts(records))),
        "partition": partition_sheet(records),
        "traffic": sheet_of(f"{records.name}: communication", [traffic] if traffic else []),
    }
    return {name: sheet for name, sheet in sheets.items() if sheet is not None}


def _informative(charts: Sequence[RoundChart]) -> list[RoundChart]:
    """Charts that show more than a table: a change over three rounds or more."""
    return [
        chart
        for chart in charts
        if len(chart.rounds) > 2 and any(len({*line.finite.values()}) > 1 for line in chart.lines)
    ]


# ---- alone and in the federation


def paired_bars(results: Sequence[PairedResult]) -> list[BarRows]:
    """Each site, or the clients and the server, alone and in the federation, with 95 % intervals and chance."""
    rows, marks = dict[str, list[BarPart]](), dict[str, float]()
    for one in results[: _MOST_BARS // 2]:
        for colour, (how, figure) in enumerate({"alone": one.alone, "federation": one.federated}.items()):
            if figure and 0 <= figure.value <= figure.scale:
                name = f"{one.whose}, {how}"
                marks |= {name: figure.chance} if figure.chance > 0 else {}
                rows[name] = [BarPart(figure.value, format_number(figure.value, 1), colour, interval=figure.interval)]
    names = " or ".join(dict.fromkeys(one.known.metric for one in results))
    legend = [LegendEntry("95 % interval", 7), LegendEntry("chance", 2, "dotted")][: 2 if marks else 1]
    amounts = {name: f"{part.label} %" for name, (part,) in rows.items()}
    return [BarRows(f"{names} in %", rows, amounts, "", legend, marks)] if rows else []


# ---- learning curves


def server_charts(records: RunRecords) -> list[RoundChart]:
    """Recalls of the server by direction with chance, then its other metrics: percentages, sums and losses apart."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    recalls, others = recalls_and_others(metrics)
    percentages = [name for name in others if name != "r1_sum" and "loss" not in name]
    families = [percentages[start : start + len(COLOURS)] for start in range(0, len(percentages), len(COLOURS))]
    charts = [*_recall_charts(records, metrics, recalls)]
    charts += [_server_chart(records, name, _unit(name), {name: name}, metrics) for name in others if name == "r1_sum"]
    title = "Other metrics" if recalls else "Metrics"
    charts += [_server_chart(records, title, "%", {name: name for name in family}, metrics) for family in families]
    charts += [_server_chart(records, name, name, {name: name}, metrics) for name in others if "loss" in name]
    return [chart for chart in charts if chart]


def _recall_charts(
    records: RunRecords, metrics: Mapping[str, float], recalls: Sequence[Recall]
) -> Iterator[RoundChart]:
    groups: dict[tuple[str, str], list[Recall]] = {}
    for recall in recalls:
        groups.setdefault((recall.direction, recall.protocol), []).append(recall)
    validation = {recall.name: recall.gallery for recall in find_recalls(records.last(SERVER, "validation"))}
    for (direction, protocol), members in groups.items():
        gallery, other = members[0].gallery, validation.get(members[0].name, math.nan)
        title = f"{direction}{f' ({protocol})' if protocol else ''}, gallery {count(gallery)}"
        if not math.isnan(other) and other != gallery:  # neither values nor chance can be compared then
            title += f" (validation {count(other)}; chance is that of test)"
        labels = {recall.name: f"R@{recall.cutoff}" for recall in members}
        yield _server_chart(records, title, "recall (%)", labels, metrics)


def _server_chart(
    records: RunRecords, title: str, unit: str, labels: Mapping[str, str], metrics: Mapping[str, float]
) -> RoundChart:
    """Metrics of the server, one colour each; dashes distinguish test, validation and chance."""
    names = {name: (label, 1 + index % len(COLOURS)) for index, (name, label) in enumerate(labels.items())}
    lines = [
        ChartLine(f"{label} {split}", values, colour, _DASHES[split])
        for name, (label, colour) in names.items()
        for split in ("test", "validation")
        if (values := records.series(SERVER, name, split))
    ]
    rounds = sorted({number for line in lines for number in line.values})
    for name, (label, colour) in names.items():
        line = ChartLine(f"{label} chance", dict.fromkeys(rounds, chance_of(name, metrics)), colour, "dotted")
        lines += [line] * bool(line.finite)
    dashes = {line.dash for line in lines}
    styles = [LegendEntry(split, 0, dash) for split, dash in _DASHES.items() if dash in dashes]
    return RoundChart(title, unit, lines, [*(LegendEntry(*entry) for entry in names.values()), *styles])


def recorded_charts(records: RunRecords) -> list[RoundChart]:
    """Values of the server that the method recorded as ``<family>.<member>``, one chart per family.

    A family of more members than there are colours (losses of many clients) is shown by mean and range.
    """
    families: dict[str, dict[str, RoundSeries]] = {}
    for name in records.metric_names(SERVER, "train"):
        family = name.split(".")[0]
        families.setdefault(family, {})[name.removeprefix(f"{family}.")] = records.series(SERVER, name, "train")
    charts = []
    for family, members in families.items():
        series = {name: values for name, values in members.items() if len({*values.values()}) > 1}  # else settings
        title = family.replace("_", " ")
        if len(series) > len(COLOURS):
            charts.append(spread_chart(title, family, series, 1, carry=False))
            continue
        lines = [ChartLine(label, values, colour) for colour, (label, values) in enumerate(series.items(), 1)]
        legend = [LegendEntry(line.label, line.colour) for line in lines] if len(lines) > 1 else []
        charts.append(RoundChart(title, family, lines, legend))
    return [chart for chart in charts if chart]


def client_charts(records: RunRecords) -> list[RoundChart]:
    """The main test metric of each group of clients, or its loss where it has no other."""
    charts = []
    for group, clients in records.groups.items():
        metric = main_metric(records, clients) or "loss"
        measured = sum(bool(records.series(client, metric)) for client in clients)
        title = f"{group}: {metric}, test ({measured} of {len(clients)} clients)"
        charts.append(_group_chart(records, group, metric, title))
    return [chart for chart in charts if chart]


def metric_charts(records: RunRecords, metric: str) -> list[RoundChart]:
    """One metric wherever it was measured: for the server by split, for each group of clients on its test data."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    charts = [_server_chart(records, f"server: {metric}", _unit(metric), {metric: metric}, metrics)]
    charts += [_group_chart(records, group, metric, f"{group}: {metric}, test") for group in records.groups]
    return [chart for chart in charts if chart]


def _group_chart(records: RunRecords, group: str, metric: str, title: str) -> RoundChart:
    series = {client: records.series(client, metric) for client in records.groups[group]}
    return spread_chart(title, _unit(metric), series, _group_colour(records, group))


def spread_chart(
    title: str, unit: str, series: Mapping[str, RoundSeries], colour: int, *, carry: bool = True
) -> RoundChart:
    """Mean and range over clients by round, with a thin line for each client if there are few.

    Args:
        title: Title of the chart.
        unit: Unit of the values.
        series: Client -> its values.
        colour: Colour of mean and range.
        carry: True if a client without a value in a round counts with its latest one; otherwise it does not count.
    """
    measured = {client: finite for client, values in series.items() if (finite := finite_values(values))}
    # clients are measured when they take part: without their latest values the mean would jump with the cohort
    by_round = values_by_round(measured.values(), carry=carry)
    low, mean, high = ({number: of(values) for number, values in by_round.items()} for of in (min, finite_mean, max))
    legend = [LegendEntry("mean", colour), LegendEntry("range", colour, "band")]
    if len(measured) == 1:
        lines, legend = [], []
    elif len(measured) <= _THIN_LINES:
        lines = [ChartLine(client, values, 0, thin=True) for client, values in measured.items()]
        legend.append(LegendEntry("one client"))
    else:
        ends = {"lowest": low, "highest": high}
        lines = [ChartLine(label, values, colour, thin=True) for label, values in ends.items()]
    lines.append(ChartLine("mean", mean, colour))
    return RoundChart(title, unit, lines, legend, [ChartBand(low, high, colour)])


def _group_colour(records: RunRecords, group: str) -> int:
    return 1 + list(records.groups).index(group) % len(COLOURS)


def _unit(name: str) -> str:
    return name if "loss" in name else f"{name} (%)"


# ---- partition


def partition_sheet(records: RunRecords) -> FigureSheet | None:
    """One row per group: items by class, where labelled, and sizes as bars, unless the clients are many."""
    rows: list[list[Chart]] = []
    for group, held in run_tables.partition_groups(records.holdings).items():
        charts: list[Chart] = [_class_map(group, held)] if any(holding.labels for holding in held.values()) else []
        if len(held) <= _MOST_BARS:
            title = f"{group}: sizes ({', '.join(run_tables.sources_of(held))})"
            charts.append(_size_bars(title, held, _group_colour(records, group)))
        rows += [charts] if charts else []
    return FigureSheet(f"{records.name}: partition", rows) if rows else None


def _class_map(group: str, held: run_tables.Holdings) -> CountMap:
    names = run_tables.classes_of(held)
    shown = names[:_MOST_COLUMNS]
    counts = np.array([[(holding.labels or {}).get(name, 0) for name in shown] for holding in held.values()])
    note = f"The first {len(shown)} of {len(names)} classes." if len(shown) < len(names) else ""
    columns = run_tables.short_names(shown, held)
    if max(_MOST_BELOW, len(held)) < len(shown) <= _MOST_BARS:  # names of classes at the left leave a map narrow
        return CountMap(f"{group}: items by class", columns, counts.T, "client", list(held), "items", note)
    return CountMap(f"{group}: items by class", list(held), counts, "class", columns, "items", note)


def _size_bars(title: str, held: run_tables.Holdings, colour: int) -> BarRows:
    """Samples of each client; samples held in addition are paler."""
    rows, amounts = {}, {}
    for client, holding in held.items():
        also = int(holding.also["samples"]) if holding.also else 0
        rows[client] = [BarPart(holding.samples - also, "samples", colour)]
        if also:
            rows[client].append(BarPart(also, "samples in addition", colour, 0.45))
        items = f"{holding.items:,} items, " if holding.items != holding.samples else ""
        amounts[client] = f"{items}{holding.samples:,}{' samples' if items else ''}"
    legend = [LegendEntry("samples", colour, "area"), LegendEntry("samples in addition", colour, "band")]
    return BarRows(title, rows, amounts, "samples", legend if any(holding.also for holding in held.values()) else ())
