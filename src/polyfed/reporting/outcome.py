"""What came out of a run: a sentence, a table of at most ten lines, and what to do next; all else is in the report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import ConfigError, RunError
from polyfed.reporting.advice import advice
from polyfed.reporting.client_spread import judged_by
from polyfed.reporting.headline import (
    MAIN,
    Headline,
    clients_headline,
    common_chance,
    headline,
    interval_in_words,
    last_measured,
)
from polyfed.reporting.paired import shared_figures
from polyfed.reporting.recalls import find_recalls
from polyfed.reporting.tables import TextTable, count, duration, format_number, mib
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER, RunRecords
from polyfed.runs.twins import untouched_server

if TYPE_CHECKING:
    from rich.console import RenderableType

_ROWS = 8  # of the table, below its headings
_TWINS = {SERVER: "server_only", "clients": "local"}
_SAME = {
    "server_only": ("data", "public", "server"),
    "local": ("data", "public", "clients"),
}  # what a run shares with it


def outcome(records: RunRecords) -> RenderableType:
    """The end of a run as something that a rich console prints: at most 30 lines of 80 columns."""
    from rich.console import Group
    from rich.table import Column, Table
    from rich.text import Text

    from polyfed.reporting.fitted_tables import FittedTable

    warnings = [Text(f"warning: {warning}", style="yellow") for warning in records.warnings]
    sentence = Text(verdict(records), style="bold")
    told = advice(records)
    sentences = [sentence, *([Text(f"Advice: {told}")] if told else [])]
    steps = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 1))
    for what, command in next_steps(records):
        steps.add_row(Text(what, style="dim"), Text(command))
    beside = [part for table in twin_tables(records) for part in (Text(), FittedTable(table))]
    return Group(*warnings, *sentences, FittedTable(outcome_table(records)), steps, *beside)


def outcome_of(folder: Path) -> RenderableType:
    return outcome(open_run(folder).records)


# ---- the sentence


def verdict(records: RunRecords) -> str:
    """What came out, against chance, untouched encoders and training alone, where twins of these are finished."""
    seconds = sum(records.seconds.values())
    took = f"{records.rounds} rounds" + (f" in {duration(seconds)}" if seconds else "")
    best = headline(records)
    if best is None:
        return f"{records.name} is finished ({took}); nobody was measured."
    clauses = [best.meaning.format(format_number(best.value)), *interval_in_words(best.interval)]
    if best.chance > 0 and not best.is_above_chance:
        clauses.append(f"no better than chance ({format_number(best.chance)} %)")
    elif best.chance > 0:
        times = best.value / best.chance
        clauses.append(f"{times:.{1 if times >= 1.1 else 2}f} times chance ({format_number(best.chance)} %)")
    sentence = ", ".join([*clauses, f"after {took}."])
    return " ".join([sentence, *_beside_untouched(records, best), *_beside_alone(records, best)])


def _beside_untouched(records: RunRecords, best: Headline) -> Iterator[str]:
    """Whether the server's figure is above that of its encoders as they come."""
    twin = finished_zero_shot(records) if best.participant == SERVER else None
    untouched = twin.last(SERVER).get(best.metric, math.nan) if twin else math.nan
    if not math.isnan(untouched):
        yield _compared("That", best, untouched, f"the untouched encoders (zero-shot), {format_number(untouched)} %")


def _beside_alone(records: RunRecords, best: Headline) -> Iterator[str]:
    """Whether what clients reach is above what each reaches alone, where the twin ``local`` is finished."""
    own, twin = clients_headline(records), finished_twin(records, _TWINS["clients"])
    alone = clients_headline(twin) if own and twin else None
    if own and alone and own.metric == alone.metric:
        subject = (
            "That" if best.participant == own.participant else f"Its clients' {own.metric}, {format_number(own.value)},"
        )
        yield _compared(subject, own, alone.value, f"training alone (local), {format_number(alone.value)}")


def _compared(subject: str, own: Headline, other: float, shown: str) -> str:
    """Whether a figure is above another, or too near for its interval."""
    low, high = own.interval or (own.value, own.value)
    if low <= other <= high:
        return f"These test items do not tell it from {shown}."
    return f"{subject} is {'above' if low > other else 'below'} {shown}."


# ---- the twin: the same federation without federated learning


def twin_tables(records: RunRecords) -> list[TextTable]:
    """What ``polyfed compare`` compares of a run and its twins: own figures, the twin's, their differences."""
    best = headline(records)
    if best is None:
        return []
    of_server = best.participant == SERVER
    alone = "the server alone" if of_server else "every client alone"
    twins = [
        (alone, "alone", finished_twin(records, _TWINS[best.participant])),
        ("the untouched encoders", "untouched", finished_zero_shot(records) if of_server else None),
    ]
    return [
        _twin_table(f"Beside {beside}", column, (records, twin), of_server) for beside, column, twin in twins if twin
    ]


def _twin_table(beside: str, column: str, runs: tuple[RunRecords, RunRecords], of_server: bool) -> TextTable:
    rows = [
        (name, format_number(own), format_number(other), f"{own - other:+.2f}")
        for name, (own, other) in shared_figures(*runs).items()
        if name.startswith(f"{SERVER} ") == of_server
    ]
    return TextTable(f"{beside}: {runs[1].name}", ("test, one seed", "here", column, "difference"), rows)


def finished_twin(records: RunRecords, algorithm: str) -> RunRecords | None:
    """A finished run beside this one with the same federation, seed and rounds, and this algorithm."""
    if _algorithm(records) == algorithm or not records.config:
        return None
    for twin in _finished_beside(records):
        is_same = _algorithm(twin) == algorithm and not _is_zero_shot(twin)
        if is_same and _conditions(twin, algorithm) == _conditions(records, algorithm):
            return twin
    return None


def finished_zero_shot(records: RunRecords) -> RunRecords | None:
    """A finished run beside this one whose server has the same encoders as they come, task, data and seed."""
    server = _untouched_server(records)
    for twin in _finished_beside(records) if server else ():
        is_same = twin.config.get("server") == server and twin.config.get("data") == records.config.get("data")
        if _is_zero_shot(twin) and is_same and twin.number("seed") == records.number("seed"):
            return twin
    return None


def _untouched_server(records: RunRecords) -> dict[str, Any] | None:
    """Settings of the server of a run's twin zero-shot; None if it is such a twin, or has none."""
    try:
        return None if _is_zero_shot(records) else untouched_server(records.section("server"))
    except ConfigError:
        return None
    except (KeyError, TypeError, AttributeError):  # settings that somebody edited: no reason to spoil the end of a run
        return None


def _finished_beside(records: RunRecords) -> Iterator[RunRecords]:
    """Finished runs in the folder that a run's own lies in."""
    folder = records.folder.resolve()
    for other in sorted(folder.parent.iterdir()):
        if other != folder and (other / "report.html").is_file():
            try:
                yield open_run(other).records
            except RunError:  # some other run is damaged: no reason to spoil the end of this one
                continue


def _is_zero_shot(records: RunRecords) -> bool:
    return records.section("twin").get("kind") == "zero-shot"


def _algorithm(records: RunRecords) -> str:
    return str(records.section("algorithm").get("name", ""))


def _conditions(records: RunRecords, algorithm: str) -> list[Any]:
    """What a run and its twin must have in common: the federation as far as it matters there, seed and rounds."""
    config, run = records.untuned_config, records.section("run")
    return [*(config.get(part) for part in _SAME[algorithm]), run.get("seed"), run.get("rounds")]


# ---- the table


def outcome_table(records: RunRecords) -> TextTable:
    """Main figures of the server and of each group of clients, in at most ten lines."""
    rows = [*_server_rows(records), *_group_rows(records)]
    if len(rows) > _ROWS:
        rows = [*rows[: _ROWS - 1], ("... more in the report", "", "", "")]
    seconds = sum(records.seconds.values())
    note = f"{mib(records.total_bytes())} MiB sent, {len(records.clients)} clients"
    note += (f", {duration(seconds)}" if seconds else "") + f"; {records.replies_in_words}"
    return TextTable("", ("test", "final", "chance", "best (round)"), rows, (note,))


def _server_rows(records: RunRecords) -> Iterator[tuple[str, ...]]:
    metrics = records.last(SERVER)
    shown = {
        recall.name: (f"{recall.direction} R@{recall.cutoff} of {count(recall.gallery)}", recall.chance)
        for recall in find_recalls(metrics)
        if recall.cutoff in (1, 10) and not recall.protocol
    }
    shown |= {metric: (metric, common_chance(metric, [metrics])) for metric in MAIN if metric in metrics}
    for metric, (label, chance) in shown.items():
        best = records.best(SERVER, metric)
        at_best = f"{format_number(best[1])} ({best[0]})" if best else "-"
        yield f"server: {label}", format_number(metrics[metric]), format_number(chance), at_best


def _group_rows(records: RunRecords) -> Iterator[tuple[str, ...]]:
    for group, spread in judged_by(records)[1].items():
        if not spread.metric:
            continue
        chance = common_chance(spread.metric, last_measured(records, records.groups[group], spread.metric))
        mean = f", mean of {len(spread.values)}" if spread.clients > 1 else ""
        yield f"{group}{mean}: {spread.metric}", format_number(spread.mean), format_number(chance), "-"


# ---- what to do next


def next_steps(records: RunRecords) -> Sequence[tuple[str, str]]:
    """Commands for what one wants next, and where the report is."""
    folder = shlex.quote(str(records.folder))
    server = records.section("server")
    has_model = bool(server) and (records.folder / "models").is_dir()
    steps = [("report", f"open {shlex.quote(str(records.folder / 'report.html'))}")]
    if has_model:
        steps.append(("evaluate", f"polyfed evaluate {folder} --data {shlex.quote(str(server.get('source', '')))}"))
    steps.append(("compare", f"polyfed compare {folder} OTHER_RUN"))
    steps += _steps_with_twins(records, shlex.quote(str(records.folder / "config.yaml")))
    if has_model:
        steps.append(("export", f"polyfed export {folder}"))
    return steps


def _steps_with_twins(records: RunRecords, config: str) -> Iterator[tuple[str, str]]:
    """The run that this one is to be compared with; or, of a tuned twin, the way to other seeds."""
    twin, server = records.section("twin"), records.section("server")
    if twin.get("tuned") is not None:
        yield "seeds", f"polyfed run {config} --seeds 1,2,3"
    has_server_only = records.config.get("public") and server.get("validation_split")
    baseline = _TWINS[SERVER if has_server_only else "clients"]
    if records.config and not twin and _algorithm(records) != baseline and finished_twin(records, baseline) is None:
        kind = baseline.replace("_", "-")
        yield "baseline", f"polyfed run {config} --twin {kind} --out {shlex.quote(f'{records.folder}-{kind}')}"
    yield from _step_to_zero_shot(records, config)


def _step_to_zero_shot(records: RunRecords, config: str) -> Iterator[tuple[str, str]]:
    if not records.section("twin") and _untouched_server(records) and finished_zero_shot(records) is None:
        out = shlex.quote(f"{records.folder}-zero-shot")
        yield "untouched", f"polyfed run {config} --twin zero-shot --out {out}"
