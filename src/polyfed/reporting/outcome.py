"""What came out of a run: a sentence, a table of at most ten lines, and what to do next; all else is in the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RunError
from polyfed.reporting.client_spread import client_spread, quality_names
from polyfed.reporting.recalls import Recall, find_recalls
from polyfed.reporting.tables import TextTable, count, duration, figure, mib
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER, RunRecords

if TYPE_CHECKING:
    from rich.console import RenderableType

_ROWS = 8  # of the table, below its headings
_DEVIATIONS = 2.0  # standard deviations above chance that count as better than it
Metrics = Mapping[str, float]

_SAME = ("data", "public", "server", "clients")
_MAIN = ("accuracy", "r1_sum")
_TWINS = {SERVER: "server_only", "clients": "local"}


@dataclass(frozen=True)
class Headline:
    """The one figure that a run is judged by.

    Attributes:
        participant: ``server`` or ``clients``.
        metric: its name.
        value: after the last evaluation; of clients the mean over those that have it.
        chance: what guessing reaches, NaN where that is not known.
        meaning: a clause with a place for the value.
        trials: test items that the value is a share of, NaN where that is not known; of a mean over clients as many
            as would deviate as far.
    """

    participant: str
    metric: str
    value: float
    chance: float
    meaning: str
    trials: float = math.nan

    @property
    def is_above_chance(self) -> bool:
        """Whether guessing seldom reaches as much on so many test items; on unknown many, whether it is more."""
        share = self.chance / 100.0
        deviation = 100.0 * math.sqrt(share * (1.0 - share) / self.trials) if self.trials > 0 else 0.0
        return self.value > self.chance + _DEVIATIONS * deviation


def outcome(records: RunRecords) -> RenderableType:
    """The end of a run as something that a rich console prints: at most 30 lines of 80 columns."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    warnings = [Text(f"warning: {warning}", style="yellow") for warning in records.warnings]
    sentence = Text(verdict(records), style="bold")
    steps = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 1))
    for what, command in next_steps(records):
        steps.add_row(Text(what, style="dim"), Text(command))
    return Group(Text(), *warnings, sentence, outcome_table(records).rich(), steps)


def outcome_of(folder: Path) -> RenderableType:
    """How the run in a folder came out."""
    return outcome(open_run(folder).records)


def verdict(records: RunRecords) -> str:
    """What came out, against chance and against the same federation without federated learning, if that was run."""
    seconds = sum(records.seconds.values())
    took = f"{records.rounds} rounds" + (f" in {duration(seconds)}" if seconds else "")
    best = headline(records)
    if best is None:
        return f"{records.name} is finished ({took}); nobody was measured."
    what = best.meaning.format(figure(best.value))
    return f"{what}{_against_chance(best)}{_against_twin(records, best)}, after {took}."


def headline(records: RunRecords) -> Headline | None:
    """The server's main figure, else the clients'; None if nothing was measured."""
    metrics = records.last(SERVER)
    recalls = [recall for recall in find_recalls(metrics) if not recall.protocol] or find_recalls(metrics)
    if recalls:
        best = max(recalls, key=lambda recall: (recall.cutoff, recall.direction.startswith("text")))
        source, _, target = best.direction.partition(" to ")
        first = f"the first {best.cutoff} of {count(best.gallery)}"
        meaning = f"The server finds the {target} of a {source} among {first} in {{}} % of cases"
        return Headline(SERVER, best.name, best.value, best.chance, meaning, _queries(metrics, best))
    if "accuracy" in metrics:
        meaning = "The server's accuracy is {} %"
        return Headline(SERVER, "accuracy", metrics["accuracy"], _guessing(metrics), meaning, _items(metrics))
    return _clients_headline(records)


def _clients_headline(records: RunRecords) -> Headline | None:
    last = {client: records.last(client) for client in records.clients}
    for metric in _MAIN:
        values = {client: metrics[metric] for client, metrics in last.items() if metric in metrics}
        finite = [value for value in values.values() if math.isfinite(value)]
        if finite:
            chances = {_guessing(last[client]) for client in values} if metric == "accuracy" else {math.nan}
            chance = chances.pop() if len(chances) == 1 else math.nan
            unit = " %" if metric == "accuracy" else ""
            meaning = f"The {_shared(metric, finite)} is {{}}{unit}"
            trials = _together([_items(last[client]) for client, value in values.items() if math.isfinite(value)])
            return Headline("clients", metric, sum(finite) / len(finite), chance, meaning, trials)
    return None


def _shared(metric: str, values: list[float]) -> str:
    if len(values) == 1:
        return f"{metric} of the one client that has it"
    return f"mean {metric} of the {len(values)} clients that have it"


def _items(metrics: Metrics) -> float:
    return metrics.get("n", math.nan)


def _queries(metrics: Metrics, recall: Recall) -> float:
    """Queries of a recall over one gallery: they are the gallery of the other direction."""
    source = recall.direction.partition(" to ")[0]
    return metrics.get(f"gallery_{source}", math.nan) if not recall.protocol else math.nan


def _together(items: Sequence[float]) -> float:
    """Items of which one share deviates as far from chance as the mean of the shares of several clients' items."""
    return len(items) ** 2 / sum(1.0 / each for each in items) if all(each > 0 for each in items) else math.nan


def _guessing(metrics: Metrics) -> float:
    classes = metrics.get("classes", math.nan)
    return 100.0 / classes if classes else math.nan


def _against_chance(best: Headline) -> str:
    if not best.chance > 0:
        return ""
    if not best.is_above_chance:
        return f", no better than chance ({figure(best.chance)} %)"
    times = best.value / best.chance
    return f", {times:.{1 if times >= 1.1 else 2}f} times chance ({figure(best.chance)} %)"


# ---- the twin: the same federation without federated learning


def _against_twin(records: RunRecords, best: Headline) -> str:
    twin = finished_twin(records, _TWINS[best.participant])
    if twin is None:
        return ""
    other = twin.last(SERVER).get(best.metric, math.nan) if best.participant == SERVER else _mean(twin, best.metric)
    if not math.isfinite(other):
        return ""
    alone = "training it alone" if best.participant == SERVER else "every client alone"
    above = best.value - other
    apart = "above" if above > 0 else "below"
    how = "as much as" if figure(abs(above)) == figure(0.0) else f"{figure(abs(above))} {apart}"
    return f", {how} {alone} ({figure(other)} in {twin.name})"


def finished_twin(records: RunRecords, algorithm: str) -> RunRecords | None:
    """A finished run beside this one with the same federation, seed and rounds, and this algorithm."""
    if _algorithm(records) == algorithm or not records.config:
        return None
    for folder in sorted(records.folder.resolve().parent.iterdir()):
        if folder != records.folder.resolve() and (folder / "report.html").is_file():
            twin = _read(folder)
            if twin is not None and _algorithm(twin) == algorithm and _sameness(twin) == _sameness(records):
                return twin
    return None


def _read(folder: Path) -> RunRecords | None:
    try:
        return open_run(folder).records
    except RunError:  # some other run is damaged: no reason to spoil the end of this one
        return None


def _algorithm(records: RunRecords) -> str:
    return str(records.config.get("algorithm", {}).get("name", ""))


def _sameness(records: RunRecords) -> list[Any]:
    """What two runs must have in common to be compared: the federation, seed and rounds."""
    run = records.config.get("run", {})
    return [*(records.config.get(part) for part in _SAME), run.get("seed"), run.get("rounds")]


def _mean(records: RunRecords, metric: str) -> float:
    values = [records.last(client).get(metric, math.nan) for client in records.clients]
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


# ---- the table


def outcome_table(records: RunRecords) -> TextTable:
    """Main figures of the server and of each group of clients, in at most ten lines."""
    rows = [*_server_rows(records), *_group_rows(records)]
    if len(rows) > _ROWS:
        rows = [*rows[: _ROWS - 1], ("... more in the report", "", "", "")]
    seconds, sent = sum(records.seconds.values()), records.total_bytes()
    left_out = {event.participant for event in records.excluded()}
    note = f"{mib(sent)} MiB sent, {len(records.clients)} clients" + (f", {duration(seconds)}" if seconds else "")
    note += f"; left out at times: {len(left_out)}" if left_out else ""
    held_back = {event.participant for event in records.shortened()}
    note += f"; shortened at times: {len(held_back)}" if held_back else ""
    return TextTable("", ("test", "final", "chance", "best (round)"), rows, (note,))


def _server_rows(records: RunRecords) -> Iterator[tuple[str, ...]]:
    metrics = records.last(SERVER)
    recalls = [recall for recall in find_recalls(metrics) if recall.cutoff in (1, 10) and not recall.protocol]
    for recall in recalls:
        label = f"server: {recall.direction} R@{recall.cutoff} of {count(recall.gallery)}"
        yield label, figure(recall.value), figure(recall.chance), _best(records, recall.name)
    for metric in _MAIN:
        if metric in metrics:
            chance = _guessing(metrics) if metric == "accuracy" else math.nan
            yield f"server: {metric}", figure(metrics[metric]), figure(chance), _best(records, metric)


def _group_rows(records: RunRecords) -> Iterator[tuple[str, ...]]:
    for group, clients in records.groups.items():
        last = [records.last(client) for client in clients]
        names = quality_names(last)
        metric = next((name for name in _MAIN if name in names), names[0] if names else "")
        if not metric:
            continue
        spread = client_spread(records, group, metric, "test")
        chances = {_guessing(metrics) for metrics in last if metric in metrics} if metric == "accuracy" else {math.nan}
        chance = chances.pop() if len(chances) == 1 else math.nan
        some = f", mean of {len(spread.values)}" if spread.clients > 1 else ""
        yield f"{group}{some}: {metric}", figure(spread.mean), figure(chance), "-"


def _best(records: RunRecords, metric: str) -> str:
    best = records.best(SERVER, metric)
    return f"{figure(best[1])} ({best[0]})" if best else "-"


# ---- what to do next


def next_steps(records: RunRecords) -> Sequence[tuple[str, str]]:
    """Commands for what one wants next, and where the report is."""
    folder = shlex.quote(str(records.folder))
    steps = [("report", f"open {shlex.quote(str(records.folder / 'report.html'))}")]
    server = records.config.get("server") or {}
    if server and (records.folder / "models").is_dir():
        steps.append(("evaluate", f"polyfed evaluate {folder} --data {shlex.quote(str(server.get('source', '')))}"))
    steps.append(("compare", f"polyfed compare {folder} OTHER_RUN"))
    baseline = _TWINS[SERVER if server else "clients"]
    if records.config and _algorithm(records) != baseline and finished_twin(records, baseline) is None:
        config = shlex.quote(str(records.folder / "config.yaml"))
        out = shlex.quote(f"{records.folder}-{baseline.replace('_', '-')}")
        steps.append(("baseline", f"polyfed run {config} --set algorithm={baseline} --out {out}"))
    if server and (records.folder / "models").is_dir():
        steps.append(("export", f"polyfed export {folder}"))
    return steps
