"""Learning curves: the server's by family of metrics, and those of each group of clients with their range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from polyfed.reporting.compare import PREFERRED
from polyfed.reporting.html.cells import folded, text_table
from polyfed.reporting.html.charts import COLOURS, Band, Key, Line, Series, grid, line_chart
from polyfed.reporting.html.markup import Markup, tag
from polyfed.reporting.recalls import Recall, find_recalls, is_context
from polyfed.reporting.report import clients_table, server_tables
from polyfed.reporting.tables import count
from polyfed.runs.records import SERVER, RunRecords

THIN_LINES = 20  # up to so many clients have a line of their own
_DASHES = {"test": "solid", "validation": "dashed"}


def server_curves(records: RunRecords) -> Markup:
    """Charts and tables of the server's metrics; nothing if it never was measured."""
    metrics = {**records.last(SERVER, "validation"), **records.last(SERVER, "test")}
    recalls = find_recalls(metrics)
    families = [*_recall_charts(records, recalls), *_other_charts(records, metrics, recalls)]
    tables = [text_table(table) for kind in _DASHES for table in server_tables(records, kind) if table.rows]
    own = grid(*_recorded(records))
    return Markup(
        grid(*families)
        + (folded("Tables: final, best, chance", tables) if tables else "")
        + (tag("div", heading("Recorded by the method"), own, class_="block apart") if own else "")
    )


def client_curves(records: RunRecords) -> Markup:
    """A chart of the main metric and one of the loss for each group of clients, and a table of their ends."""
    charts = [
        _group_chart(records, group, metric)
        for group, clients in records.groups.items()
        for metric in dict.fromkeys((main_metric(records, clients), "loss"))
        if metric
    ]
    table = clients_table(records, "test")
    shown = folded("Table: mean, worst client, disparity", text_table(table)) if table.rows else ""
    return Markup(grid(*charts) + shown)


def main_metric(records: RunRecords, participants: Iterable[str], kind: str = "test") -> str:
    """The metric that says most of some participants, empty if they have none."""
    names = dict.fromkeys(name for participant in participants for name in records.metric_names(participant, kind))
    quality = [name for name in names if not is_context(name) and name != "loss"]
    return next((name for name in PREFERRED if name in names), quality[0] if quality else "")


def chance_of(metric: str, metrics: Mapping[str, float]) -> float:
    """What guessing reaches, in percent; NaN where that is not known.

    For a recall and the sum of the recalls at 1 a random order of the gallery, for (balanced) accuracy a uniform guess
    among the classes.
    """
    recalls = find_recalls(metrics)
    if metric == "r1_sum":
        firsts = [recall.chance for recall in recalls if recall.cutoff == 1]
        return sum(firsts) if firsts else math.nan
    if metric in ("accuracy", "balanced_accuracy") and metrics.get("classes", 0) > 0:
        return 100.0 / metrics["classes"]
    return next((recall.chance for recall in recalls if recall.name == metric), math.nan)


def spread_chart(
    title: str, unit: str, series: Mapping[str, Series], colour: int, extra: Sequence[Line] = (), *, carry: bool = True
) -> Markup:
    """Mean and range over clients by round, with a thin line for each client if there are few.

    With ``carry``, of a client that has no value in a round its latest one counts.
    """
    known = {client: _finite(values) for client, values in series.items()}
    low, mean, high = _spread([values for values in known.values() if values], carry=carry)
    thin = [Line(client, values, ("one client",), colour=0, thin=True) for client, values in known.items() if values]
    shown = thin if len(thin) <= THIN_LINES else []
    ends = [
        Line("lowest", low, (), listed=not shown, thin=True),
        Line("highest", high, (), listed=not shown, thin=True),
    ]
    hidden = [Line(line.label, line.values, ("range",), colour, thin=True) for line in ends] if not shown else []
    lines = [*shown, *hidden, Line("mean", mean, ("mean",), colour), *extra]
    keys = [Key("mean", colour), Key("range", colour, "band"), *([Key("one client", 0)] if shown else [])]
    keys += [Key(line.label, line.colour, line.dash) for line in extra]
    return line_chart(title, unit, lines, keys, [Band(low, high, ("range",), colour)])


def _recall_charts(records: RunRecords, recalls: Sequence[Recall]) -> Iterator[Markup]:
    groups: dict[tuple[str, str], list[Recall]] = {}
    for recall in recalls:
        groups.setdefault((recall.direction, recall.protocol), []).append(recall)
    for (direction, protocol), found in groups.items():
        labels = {recall.name: f"R@{recall.cutoff}" for recall in found}
        chances = {recall.name: recall.chance for recall in found}
        title = f"{direction}{f' ({protocol})' if protocol else ''}, {_galleries(records, found[0])}"
        yield _server_chart(records, title, "recall (%)", labels, chances)


def _galleries(records: RunRecords, shown: Recall) -> str:
    """Size of the gallery, and that of validation where it differs: then neither values nor chance are comparable."""
    others = find_recalls(records.last(SERVER, "validation"))
    other = next((recall.gallery for recall in others if recall.name == shown.name), math.nan)
    same = math.isnan(other) or other == shown.gallery
    more = "" if same else f" (validation {count(other)}; chance is that of test)"
    return f"gallery {count(shown.gallery)}{more}"


def _other_charts(records: RunRecords, metrics: Mapping[str, float], recalls: Sequence[Recall]) -> Iterator[Markup]:
    known = {recall.name for recall in recalls}
    names = [name for name in metrics if name not in known and not is_context(name)]
    alone = [name for name in names if "loss" in name or name == "r1_sum"]
    for name in alone:
        yield _server_chart(records, _title(name), _unit(name), {name: name}, {name: chance_of(name, metrics)})
    others = {name: name for name in names if name not in alone}
    for start in range(0, len(others), COLOURS):
        part = dict(list(others.items())[start : start + COLOURS])
        yield _server_chart(records, "Other metrics", "%", part, {name: chance_of(name, metrics) for name in part})


def _unit(name: str) -> str:
    """A loss has no unit, the metrics of tasks are in percent."""
    return name if "loss" in name else f"{name} (%)"


def _title(name: str) -> str:
    return {"r1_sum": "Sum of recalls at 1 (r1_sum)"}.get(name, name)


def _server_chart(
    records: RunRecords, title: str, unit: str, labels: Mapping[str, str], chances: Mapping[str, float]
) -> Markup:
    lines = [
        Line(f"{label} {kind}", records.series(SERVER, name, kind), (label, kind), 1 + place % COLOURS, dash)
        for place, (name, label) in enumerate(labels.items())
        for kind, dash in _DASHES.items()
    ]
    lines = [line for line in lines if line.values]
    rounds = {number for line in lines for number in line.values}
    kinds = [kind for kind in _DASHES if any(kind in line.keys for line in lines)]
    keys = [Key(label, 1 + place % COLOURS) for place, label in enumerate(labels.values())]
    keys += [Key(kind, 0, _DASHES[kind]) for kind in kinds]
    known = {name: chance for name, chance in chances.items() if math.isfinite(chance)} if rounds else {}
    for place, name in enumerate(labels):
        if name in known:
            flat = dict.fromkeys((min(rounds), max(rounds)), known[name])
            lines.append(Line("chance", flat, ("chance", labels[name]), 1 + place % COLOURS, "dotted", listed=False))
    return line_chart(title, unit, lines, keys + ([Key("chance", 0, "dotted")] if known else []))


def _recorded(records: RunRecords) -> Iterator[Markup]:
    """What the method itself recorded of the server: ``<family>.<member>``, one chart a family.

    Of more members than there are colours (losses of many clients) it shows mean and range.
    """
    families: dict[str, list[str]] = {}
    for name in records.metric_names(SERVER, "train"):
        families.setdefault(name.split(".")[0], []).append(name)
    for family, names in families.items():
        title = family.replace("_", " ")
        series = {name.removeprefix(f"{family}."): records.series(SERVER, name, "train") for name in names}
        if len(series) > COLOURS:
            yield spread_chart(title, family, series, 1, carry=False)
            continue
        lines = [Line(label, values, (label,), place) for place, (label, values) in enumerate(series.items(), start=1)]
        keys = [Key(line.label, line.colour) for line in lines] if len(lines) > 1 else []
        yield line_chart(title, family, lines, keys)


def _group_chart(records: RunRecords, group: str, metric: str) -> Markup:
    clients = records.groups[group]
    series = {client: records.series(client, metric) for client in clients}
    measured = sum(bool(values) for values in series.values())
    colour = group_colour(records, group)
    title = f"{group}: {metric}, test ({measured} of {len(clients)} clients)"
    return spread_chart(title, _unit(metric), series, colour)


def group_colour(records: RunRecords, group: str) -> int:
    """The colour that stands for a group throughout the page."""
    return 1 + list(records.groups).index(group) % COLOURS


def _spread(series: Sequence[Series], *, carry: bool) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Lowest, mean and highest by round, of the values of the round or of the latest up to it."""
    rounds = sorted({number for values in series for number in values})
    latest: dict[int, float] = {}
    low, mean, high = {}, {}, {}
    for number in rounds:
        latest = (latest if carry else {}) | {
            place: values[number] for place, values in enumerate(series) if number in values
        }
        low[number], high[number] = min(latest.values()), max(latest.values())
        mean[number] = fmean(latest.values())
    return low, mean, high


def _finite(values: Series) -> dict[int, float]:
    return {number: value for number, value in values.items() if math.isfinite(value)}


def heading(text: str) -> Markup:
    """A heading within a section."""
    return tag("h3", text)
