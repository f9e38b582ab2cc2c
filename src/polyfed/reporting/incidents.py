"""What happened to whom: exclusions, returns and other events."""

from __future__ import annotations

from collections import Counter

from polyfed.reporting.figures import COLOURS
from polyfed.reporting.round_charts import RoundChart, stacked_chart
from polyfed.reporting.tables import TextTable
from polyfed.runs.records import RunRecords

_PURPOSE = ":"  # ends what stands before the names of steps that are no training, such as evaluation
_MOST_ROWS = 2000
_FEW = 8  # up to so many events need no chart


def timeline(records: RunRecords) -> TextTable:
    """One row an event, the latest if there are too many."""
    events = sorted(records.events, key=lambda event: event.round)
    latest = events[-_MOST_ROWS:]
    rows = [(str(event.round), event.participant, _words(event.incident), event.reason) for event in latest]
    title = f"Events{'' if len(latest) == len(events) else f' (the last {len(latest):,} of {len(events):,})'}"
    return TextTable(title, ("round", "participant", "event", "reason"), rows)


def events_chart(records: RunRecords) -> list[RoundChart]:
    """Events by round; few of them are seen at a glance in the table."""
    events = sorted(records.events, key=lambda event: event.round)
    if len(events) <= _FEW:
        return []
    # further kinds would share a colour; the table has them all
    kinds = list(dict.fromkeys(event.incident for event in events))[: len(COLOURS)]
    counts = {kind: Counter(event.round for event in events if event.incident == kind) for kind in kinds}
    parts = {_words(kind): dict(sorted(by_round.items())) for kind, by_round in counts.items()}
    return [stacked_chart("Events by round", "events", parts)]


def rounds_of(records: RunRecords) -> dict[str, list[int]]:
    """Client id -> rounds in which it answered a step of the method, ascending; evaluation and setup do not count."""
    rounds: dict[str, set[int]] = {}
    for transfer in records.transfers:
        if transfer.direction == "up" and _PURPOSE not in transfer.step:
            rounds.setdefault(transfer.client, set()).add(transfer.round)
    return {client: sorted(numbers) for client, numbers in rounds.items()}


def _words(kind: str) -> str:
    return kind.replace("_", " ")
