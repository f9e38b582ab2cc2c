"""Learning curves: the server's by family of metrics, and those of each group of clients with their range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from polyfed.reporting.charts import LegendEntry
from polyfed.reporting.client_spread import main_metric
from polyfed.reporting.figures import COLOURS
from polyfed.reporting.recalls import Recall, chance_of, find_recalls, is_context
from polyfed.reporting.round_charts import ChartBand, ChartLine, RoundChart, RoundSeries
from polyfed.reporting.statistics import finite_values
from polyfed.reporting.tables import count
from polyfed.runs.records import SERVER, RunRecords

THIN_LINES = 20
"""Up to so many clients have a line of their own."""

_DASHES = {"test": "solid", "validation": "dashed", "chance": "dotted"}


def server_charts(records: RunRecords) -> list[RoundChart]:
    """The server's recalls by direction with chance, then its losses and sums, then all other metrics together."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    recalls = find_recalls(metrics)
    charts = (*_recall_charts(records, metrics, recalls), *_other_charts(records, metrics, recalls))
    return [chart for chart in charts if chart]


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
        series = {name: values for name, values in members.items() if any(values.values())}  # a gallery of 0 is none
        known = [value for values in series.values() for value in values.values()]
        if len(known) > len(series) and len({*known}) == 1:  # one figure in all rounds
            continue
        title = family.replace("_", " ")
        # nobody tells more lines apart than there are colours
        if len(series) > len(COLOURS):
            charts.append(spread_chart(title, family, series, 1, carry=False))
            continue
        lines = [ChartLine(label, values, place) for place, (label, values) in enumerate(series.items(), 1)]
        legend = [LegendEntry(line.label, line.colour) for line in lines] if len(lines) > 1 else []
        charts.append(RoundChart(title, family, lines, legend))
    return [chart for chart in charts if chart]


def client_charts(records: RunRecords) -> list[RoundChart]:
    """The main test metric and the loss of each group of clients."""
    charts = []
    for group, clients in records.groups.items():
        # the main metric is empty where a group has no other than its loss
        for metric in filter(None, (main_metric(records, clients), "loss")):
            series = {client: records.series(client, metric) for client in clients}
            measured = sum(map(bool, series.values()))
            title = f"{group}: {metric}, test ({measured} of {len(clients)} clients)"
            charts.append(spread_chart(title, _unit(metric), series, group_colour(records, group)))
    return [chart for chart in charts if chart]


def metric_charts(records: RunRecords, metric: str) -> list[RoundChart]:
    """One metric wherever it was measured: of the server by kind, and of each group of clients on its test data."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    charts = [_server_chart(records, f"server: {metric}", _unit(metric), {metric: metric}, metrics)]
    for group, clients in records.groups.items():
        series = {client: records.series(client, metric) for client in clients}
        charts.append(spread_chart(f"{group}: {metric}, test", _unit(metric), series, group_colour(records, group)))
    return [chart for chart in charts if chart]


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
    low, mean, high = _mean_and_range(measured, carry=carry)
    legend = [LegendEntry("mean", colour), LegendEntry("range", colour, "band")]
    if len(measured) <= THIN_LINES:
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


def _mean_and_range(series: Mapping[str, RoundSeries], *, carry: bool) -> list[dict[int, float]]:
    """Lowest, mean and highest value by round."""
    import pandas as pd

    table = pd.DataFrame(list(series.values()), dtype=float).sort_index(axis="columns")  # [clients, rounds]
    if carry:
        # clients are measured when they took part: without their latest values the mean would jump with the cohort
        table = table.ffill(axis="columns")
    rounds = [int(number) for number in table.columns]
    return [dict(zip(rounds, side.tolist(), strict=True)) for side in (table.min(), table.mean(), table.max())]


def group_colour(records: RunRecords, group: str) -> int:
    return 1 + list(records.groups).index(group) % len(COLOURS)


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
        yield _server_chart(records, title, "recall (%)", {r.name: f"R@{r.cutoff}" for r in members}, metrics)


def _other_charts(records: RunRecords, metrics: Mapping[str, float], recalls: Sequence[Recall]) -> Iterator[RoundChart]:
    recall_names = {recall.name for recall in recalls}
    names = [name for name in metrics if not is_context(name) and name not in recall_names]
    # losses and sums have scales of their own; percentages share one chart
    together = []
    for name in names:
        if "loss" in name or name == "r1_sum":
            title = "Sum of recalls at 1 (r1_sum)" if name == "r1_sum" else name
            yield _server_chart(records, title, _unit(name), {name: name}, metrics)
        else:
            together.append(name)
    for start in range(0, len(together), len(COLOURS)):
        family = together[start : start + len(COLOURS)]
        yield _server_chart(records, "Other metrics", "%", dict(zip(family, family, strict=True)), metrics)


def _server_chart(
    records: RunRecords, title: str, unit: str, labels: Mapping[str, str], metrics: Mapping[str, float]
) -> RoundChart:
    """Metrics of the server, a colour each; how a line is dashed tells test, validation and chance apart."""
    names = {name: (label, 1 + place % len(COLOURS)) for place, (name, label) in enumerate(labels.items())}
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
    return RoundChart(title, unit, lines, [*(LegendEntry(*entry) for entry in names.values()), *_kinds(lines)])


def _kinds(lines: Sequence[ChartLine]) -> list[LegendEntry]:
    dashes = {line.dash for line in lines}
    return [LegendEntry(kind, 0, dash) for kind, dash in _DASHES.items() if dash in dashes]


def _unit(name: str) -> str:
    return name if "loss" in name else f"{name} (%)"
