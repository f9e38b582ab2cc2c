"""Figures of a run, which its report shows and its folder has as PNG files in ``plots/``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from polyfed.reporting import run_tables
from polyfed.reporting.charts import (
    BarPart,
    BarRows,
    Chart,
    ChartBand,
    ChartLine,
    FigureSheet,
    HeatMap,
    LegendEntry,
    RoundChart,
    RoundSeries,
    sheet_of,
    stacked_chart,
)
from polyfed.reporting.figures import COLOURS
from polyfed.reporting.metrics import Recall, chance_of, find_recalls, main_metric, recalls_and_others
from polyfed.reporting.statistics import finite_mean, finite_values, values_by_round
from polyfed.reporting.summary import RunSummary, SiteResult
from polyfed.reporting.tables import MIB, byte_size, count, duration, format_number
from polyfed.runs.records import SERVER, ClientArray, RunRecords

RUN_FIGURES = ("sites", "server", "recorded", "clients", "partition", "traffic", "bytes", "events")
"""Those that every run may have; others are of arrays that its method kept."""
THIN_LINES = 20
"""Up to so many clients have a line of their own."""

_DASHES = {"test": "solid", "validation": "dashed", "chance": "dotted"}
_FEW_EVENTS = 8  # are seen at a glance in the table
_MOST_ROWS = 30  # of bytes by client, step or bundle
_MOST_BARS = 60  # up to so many clients of a group have a bar each
_WRITTEN_CELLS = 80  # up to here counts fit into the map
_MOST_COLUMNS = 200  # of a map


def run_figures(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of a figure -> what it shows; what was not recorded is left out.

    Raises:
        RunError: an array of the run is damaged.
    """
    sheets = {
        "sites": sheet_of(f"{records.name}: sites", site_bars(RunSummary(records).sites)),
        "server": sheet_of(f"{records.name}: server", _telling(server_charts(records))),
        "recorded": sheet_of(f"{records.name}: recorded by the method", _telling(recorded_charts(records))),
        "clients": sheet_of(f"{records.name}: clients, test", _telling(client_charts(records))),
        "partition": partition_sheet(records),
        "traffic": sheet_of(f"{records.name}: communication and time", traffic_charts(records)),
        "bytes": sheet_of(f"{records.name}: where the bytes went", bytes_bars(records)),
        "events": sheet_of(f"{records.name}: events", events_charts(records)),
        **weight_sheets(records),
    }
    return {name: sheet for name, sheet in sheets.items() if sheet is not None}


def _telling(charts: Sequence[RoundChart]) -> list[RoundChart]:
    """Those that show more than the numbers of a table do: a change, over three rounds or more."""
    return [
        chart
        for chart in charts
        if len(chart.rounds) > 2 and any(len({*line.finite.values()}) > 1 for line in chart.lines)
    ]


# ---- sites


def site_bars(results: Sequence[SiteResult]) -> list[BarRows]:
    """Each alone beside in the federation, in percent of what its metric can reach, with 95 % intervals."""
    rows, amounts = dict[str, list[BarPart]](), dict[str, str]()
    for one in results[: _MOST_BARS // 2]:
        for colour, (how, figure) in enumerate({"alone": one.alone, "federated": one.federated}.items()):
            if figure and figure.scale > 0:
                name, share = f"{one.site} {how}", 100 / figure.scale
                ends = figure.interval and (share * figure.interval[0], share * figure.interval[1])
                amounts[name] = format_number(share * figure.value)
                rows[name] = [BarPart(share * figure.value, amounts[name], colour, ends=ends)]
    title = ", ".join(dict.fromkeys(one.known.label for one in results))
    return [BarRows(title, rows, amounts, "% of what can be reached, 95 % intervals")] if rows else []


# ---- learning curves


def server_charts(records: RunRecords) -> list[RoundChart]:
    """The server's recalls by direction with chance, then their sum, all other metrics together, and losses."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    recalls, others = recalls_and_others(metrics)
    charts = [*_recall_charts(records, metrics, recalls)]
    # losses and sums have scales of their own; percentages share one chart
    if "r1_sum" in others:
        charts.append(
            _server_chart(records, "Sum of recalls at 1 (r1_sum)", _unit("r1_sum"), {"r1_sum": "r1_sum"}, metrics)
        )
    losses, title = [name for name in others if "loss" in name], "Other metrics" if recalls else "Metrics"
    together = [name for name in others if name not in ("r1_sum", *losses)]
    for start in range(0, len(together), len(COLOURS)):
        family = together[start : start + len(COLOURS)]
        charts.append(_server_chart(records, title, "%", dict(zip(family, family, strict=True)), metrics))
    charts += [_server_chart(records, name, name, {name: name}, metrics) for name in losses]
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
    """Metrics of the server, a colour each; how a line is dashed tells test, validation and chance apart."""
    names = {name: (label, 1 + index % len(COLOURS)) for index, (name, label) in enumerate(labels.items())}
    lines = [
        ChartLine(f"{label} {kind}", values, colour, _DASHES[kind])
        for name, (label, colour) in names.items()
        for kind in ("test", "validation")
        if (values := records.series(SERVER, name, kind))
    ]
    rounds = sorted({number for line in lines for number in line.values})
    for name, (label, colour) in names.items():
        line = ChartLine(f"{label} chance", dict.fromkeys(rounds, chance_of(name, metrics)), colour, "dotted")
        lines += [line] * bool(line.finite)
    dashes = {line.dash for line in lines}
    styles = [LegendEntry(kind, 0, dash) for kind, dash in _DASHES.items() if dash in dashes]
    return RoundChart(title, unit, lines, [*(LegendEntry(*entry) for entry in names.values()), *styles])


def recorded_charts(records: RunRecords) -> list[RoundChart]:
    """What the method itself recorded of the server as ``<family>.<member>``, one chart a family.

    Of more members than there are colours (losses of many clients) it shows mean and range.
    """
    families: dict[str, dict[str, RoundSeries]] = {}
    for name in records.metric_names(SERVER, "train"):
        family = name.split(".")[0]
        families.setdefault(family, {})[name.removeprefix(f"{family}.")] = records.series(SERVER, name, "train")
    charts = []
    for family, members in families.items():
        series = {name: values for name, values in members.items() if len({*values.values()}) > 1}  # else settings
        title = family.replace("_", " ")
        # nobody tells more lines apart than there are colours
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
    """One metric wherever it was measured: of the server by kind, and of each group of clients on its test data."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    charts = [_server_chart(records, f"server: {metric}", _unit(metric), {metric: metric}, metrics)]
    charts += [_group_chart(records, group, metric, f"{group}: {metric}, test") for group in records.groups]
    return [chart for chart in charts if chart]


def _group_chart(records: RunRecords, group: str, metric: str, title: str) -> RoundChart:
    series = {client: records.series(client, metric) for client in records.groups[group]}
    return spread_chart(title, _unit(metric), series, _group_colour(records, group))


def spread_chart(
    title: str,
    unit: str,
    series: Mapping[str, RoundSeries],
    colour: int,
    reference: ChartLine | None = None,
    *,
    carry: bool = True,
) -> RoundChart:
    """Mean and range over clients by round, with a thin line for each client if there are few.

    Args:
        title: of the chart.
        unit: of the values.
        series: client -> its values.
        colour: of mean and range.
        reference: a line to compare with.
        carry: of a client that has no value in a round its latest one counts; otherwise it does not count there.
    """
    measured = {client: finite for client, values in series.items() if (finite := finite_values(values))}
    # clients are measured when they took part: without their latest values the mean would jump with the cohort
    by_round = values_by_round(measured.values(), carry=carry)
    low, mean, high = ({number: of(values) for number, values in by_round.items()} for of in (min, finite_mean, max))
    legend = [LegendEntry("mean", colour), LegendEntry("range", colour, "band")]
    if len(measured) == 1:
        lines, legend = [], []
    elif len(measured) <= THIN_LINES:
        lines = [ChartLine(client, values, 0, thin=True) for client, values in measured.items()]
        legend.append(LegendEntry("one client"))
    else:
        ends = {"lowest": low, "highest": high}
        lines = [ChartLine(label, values, colour, thin=True) for label, values in ends.items()]
    lines.append(ChartLine("mean", mean, colour))
    if reference is not None:
        lines.append(reference)
        legend.append(LegendEntry(reference.label, reference.colour, reference.dash))
    return RoundChart(title, unit, lines, legend, [ChartBand(low, high, colour)])


def _group_colour(records: RunRecords, group: str) -> int:
    return 1 + list(records.groups).index(group) % len(COLOURS)


def _unit(name: str) -> str:
    return name if "loss" in name else f"{name} (%)"


# ---- bytes, time and events


def traffic_charts(records: RunRecords) -> list[RoundChart]:
    sent = {
        label: {number: total / MIB for number, total in records.bytes_per_round(direction).items()}
        for direction, label in run_tables.BYTE_DIRECTIONS.items()
    }
    seconds = {"seconds": dict(sorted(records.seconds.items()))}
    charts = [
        stacked_chart(f"Sent in each round (in all {records.total_bytes() / MIB:,.1f} MiB)", "MiB", sent),
        stacked_chart(
            f"Time of each round (in all {duration(sum(records.seconds.values()))})", "seconds", seconds, first_colour=3
        ),
    ]
    return [chart for chart in charts if chart]


def bytes_bars(records: RunRecords) -> list[BarRows]:
    """MiB by bundle and step, the largest first, and by client in the order of the run; nothing of no bytes."""
    clients = run_tables.bytes_by(records, lambda transfer: transfer.client)
    totals = {
        "By bundle": _largest(run_tables.bytes_by(records, lambda sent: f"{sent.bundle} ({sent.dtype or sent.kind})")),
        "By step": _largest(run_tables.bytes_by(records, lambda sent: sent.step or "(none)")),
    }
    # few clients in the order of the run, as everywhere in a report; of many only the largest matter
    if len(clients) > _MOST_ROWS:
        totals[f"By client: the {_MOST_ROWS} with most bytes of {len(clients):,}"] = _largest(clients)
    else:
        totals["By client"] = {client: clients[client] for client in records.clients if client in clients}
    legend = [
        LegendEntry(label, colour, "area") for colour, label in enumerate(run_tables.BYTE_DIRECTIONS.values(), start=1)
    ]
    return [
        BarRows(
            title,
            {name: _byte_parts(sent) for name, sent in rows.items()},
            {name: byte_size(sent.total()) for name, sent in rows.items()},
            "MiB",
            legend,
        )
        for title, rows in totals.items()
        if rows
    ]


def _largest(totals: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    return dict(sorted(totals.items(), key=lambda item: -item[1].total())[:_MOST_ROWS])


def _byte_parts(sent: Counter[str]) -> list[BarPart]:
    return [
        BarPart(sent[direction] / MIB, f"{label}: {byte_size(sent[direction])}", colour)
        for colour, (direction, label) in enumerate(run_tables.BYTE_DIRECTIONS.items(), start=1)
    ]


def events_charts(records: RunRecords) -> list[RoundChart]:
    """Events by round, where they are many."""
    events = sorted(records.events, key=lambda event: event.round)
    if len(events) <= _FEW_EVENTS:
        return []
    # further kinds would share a colour; the table has them all
    titles = list(dict.fromkeys(event.title for event in events))[: len(COLOURS)]
    counts = {title: Counter(event.round for event in events if event.title == title) for title in titles}
    parts = {title: dict(sorted(by_round.items())) for title, by_round in counts.items()}
    return [stacked_chart("Events by round", "events", parts)]


# ---- who holds what


def partition_sheet(records: RunRecords) -> FigureSheet | None:
    """One row a group: maps of items by class (where labelled) and by column, and sizes as bars.

    Shares of each client's items by column stand where the class is made of columns. A group of many clients has the
    map by class alone.
    """
    rows: list[list[Chart]] = []
    for group, held in run_tables.partition_groups(records.holdings).items():
        # a site that tells only its sizes has no classes to show
        charts: list[Chart] = [_class_map(group, held)] if any(holding.labels for holding in held.values()) else []
        if len(held) <= _MOST_BARS:
            charts += [_column_map(held)] if any(run_tables.column_counts(held).values()) else []
            title = f"{group}: sizes ({', '.join(run_tables.sources_of(held))})"
            charts.append(_size_bars(title, held, _group_colour(records, group)))
        rows += [charts] if charts else []
    return FigureSheet(f"{records.name}: partition", rows) if rows else None


def _class_map(group: str, held: run_tables.Holdings) -> HeatMap:
    names = run_tables.classes_of(held)
    shown = names[:_MOST_COLUMNS]
    counts = np.array([[(holding.labels or {}).get(name, 0) for name in shown] for holding in held.values()])
    note = f"The first {len(shown)} of {len(names)} classes." if len(shown) < len(names) else ""
    labels = [[f"{count:,}" for count in row] for row in counts.tolist()] if counts.size <= _WRITTEN_CELLS else []
    columns, title = run_tables.short_names(shown, held), f"{group}: items by class"
    return HeatMap(title, list(held), counts.astype(float), "class", columns, note, scale="items", labels=labels)


def _column_map(held: run_tables.Holdings) -> HeatMap:
    """Per cent of each client's items on a scale from 0 to 100, with the counts where they fit."""
    counts = list(run_tables.column_counts(held).values())
    names = list(counts[0])
    items = [max(1, holding.items) for holding in held.values()]
    shares = np.array([[100 * row[name] / total for name in names] for row, total in zip(counts, items, strict=True)])
    fit = len(names) * len(held) <= _WRITTEN_CELLS
    labels = [[f"{row[name]:,}" for name in names] for row in counts] if fit else []
    columns, limits = run_tables.short_names(names, held), (0.0, 100.0)
    return HeatMap("by column (0 to 100 %)", list(held), shares, "column", columns, limits=limits, labels=labels)


def _size_bars(title: str, held: run_tables.Holdings, colour: int) -> BarRows:
    """Samples of each client, those that it holds in addition paler."""
    rows, amounts = {}, {}
    for client, holding in held.items():
        also = int(holding.also["samples"]) if holding.also else 0
        rows[client] = [BarPart(holding.samples - also, "samples", colour)]
        if also:
            rows[client].append(BarPart(also, "samples in addition", colour, 0.45))
        items = f"{holding.items:,} items, " if holding.items != holding.samples else ""
        amounts[client] = f"{items}{holding.samples:,}{' samples' if items else ''}"
    additional = any(holding.also for holding in held.values())
    legend = [LegendEntry("samples", colour, "area"), LegendEntry("samples in addition", colour, "band")]
    return BarRows(title, rows, amounts, "samples", legend if additional else ())


# ---- aggregation weights by client and public sample


def weight_sheets(records: RunRecords) -> dict[str, FigureSheet]:
    """Name of an array -> its values by client and sample in the last round, and each client's mean by round.

    Raises:
        RunError: a file is damaged.
    """
    # an array may name clients that the records do not: they come last, by name
    rank = {client: number for number, client in enumerate(records.clients)}
    sheets = {}
    for name, stored in records.arrays().items():
        rounds = {number: array for number, array in sorted(stored.items()) if array.values.size}
        if rounds:
            present = {client for array in rounds.values() for client in array.clients}
            clients = sorted(present, key=lambda client: (rank.get(client, len(rank)), client))
            last = max(rounds)
            charts = [_weight_map(f"{name}, round {last}", rounds[last], clients), _mean_weights(name, rounds, clients)]
            sheets[name] = FigureSheet(f"{records.name}: {name}", [charts])
    return sheets


def _weight_map(title: str, array: ClientArray, order: Sequence[str]) -> HeatMap:
    """Samples are averaged in runs of equal length where they are many."""
    rows = [client for client in order if client in array.clients]
    samples = array.values.shape[1]
    width = -(-samples // _MOST_COLUMNS)
    starts = np.arange(0, samples, width)
    # the last run may be shorter, so sums are divided by true lengths
    means = np.add.reduceat(array.values, starts, axis=1) / np.diff([*starts, samples])
    columns = [f"{first} to {min(samples, first + width) - 1}" if width > 1 else f"{first}" for first in starts]
    note = f"Each column is the mean of {width} samples." if width > 1 else ""
    values = means[[array.clients.index(client) for client in rows]]
    return HeatMap(title, rows, values, "public sample", columns, note, scale="weight")


def _mean_weights(name: str, rounds: Mapping[int, ClientArray], clients: Sequence[str]) -> RoundChart:
    series: dict[str, dict[int, float]] = {client: {} for client in clients}
    for number, array in rounds.items():
        for client, mean in zip(array.clients, array.values.mean(axis=1), strict=True):
            series[client][number] = float(mean)
    equal = {number: 1 / len(array.clients) for number, array in rounds.items()}
    title, reference = f"Mean of {name} by client", ChartLine("equal weights", equal, 0, "dotted")
    if len(clients) > THIN_LINES:
        return spread_chart(title, "mean weight", series, 1, reference, carry=False)
    dashes = ("solid", "dashed", "dotted")
    lines = [
        ChartLine(client, values, 1 + index % len(COLOURS), dashes[index // len(COLOURS) % len(dashes)])
        for index, (client, values) in enumerate(series.items())
    ]
    lines.append(reference)
    return RoundChart(title, "mean weight", lines, [LegendEntry(line.label, line.colour, line.dash) for line in lines])
