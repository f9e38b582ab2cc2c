"""What happened to whom: exclusions and other events, and the first answer after an exclusion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from polyfed.reporting.html.cells import Column, data_table
from polyfed.reporting.html.charts import COLOURS, Line, stacked_chart
from polyfed.reporting.html.markup import Markup, tag
from polyfed.runs.records import SITE_REFUSED, EventRecord, RunRecords

_RETURNED = "client_returned"
_PURPOSE = ":"  # ends what stands before the names of steps that are no training, such as evaluation
_MOST_ROWS = 2000
_FEW = 8  # up to so many events need no chart
_COLUMNS = [
    Column("round", numeric=False),
    Column("participant", numeric=False),
    Column("event", numeric=False),
    Column("reason", numeric=False),
]


def events(records: RunRecords) -> Markup:
    """A timeline that can be narrowed to one participant; nothing if nothing happened."""
    found = sorted([*records.events, *_returns(records)], key=lambda event: event.round)
    if not found:
        return Markup()
    shown = found[-_MOST_ROWS:]
    rows = [[str(event.round), event.participant, _pill(event.event), event.reason] for event in shown]
    caption = f"Events{'' if len(shown) == len(found) else f' (the last {len(shown):,} of {len(found):,})'}"
    table = data_table(
        _COLUMNS,
        rows,
        caption=caption,
        id_="timeline",
        filters=[{"data_participant": event.participant} for event in shown],
    )
    return Markup(_chart(found) + _filter(shown) + table)


def rounds_of(records: RunRecords) -> dict[str, list[int]]:
    """Client id -> rounds in which it answered a step of the method, ascending; evaluation and setup do not count."""
    found: dict[str, set[int]] = {}
    for transfer in records.transfers:
        if transfer.direction == "up" and _PURPOSE not in transfer.step:
            found.setdefault(transfer.client, set()).add(transfer.round)
    return {client: sorted(rounds) for client, rounds in found.items()}


def _returns(records: RunRecords) -> list[EventRecord]:
    """Read off the ledger, where the run did not record it: a client that was excluded answers again."""
    recorded = {(event.participant, event.round) for event in records.events if event.event == _RETURNED}
    rounds = rounds_of(records)
    returns: dict[tuple[str, int], EventRecord] = {}
    for event in records.excluded():
        later = next((number for number in rounds.get(event.participant, ()) if number > event.round), None)
        if later is not None and not any((event.participant, n) in recorded for n in range(event.round, later + 1)):
            reason = f"first answer after its exclusion in round {event.round}"
            returns[event.participant, later] = EventRecord(later, event.participant, _RETURNED, reason)
    return list(returns.values())


def _chart(found: Sequence[EventRecord]) -> Markup:
    """Events by round; few of them are seen at a glance in the table."""
    if len(found) <= _FEW:
        return Markup()
    kinds = list(dict.fromkeys(event.event for event in found))[:COLOURS]
    counts = {kind: Counter(event.round for event in found if event.event == kind) for kind in kinds}
    parts = [
        Line(_words(kind), dict(sorted(counts[kind].items())), (_words(kind),), place)
        for place, kind in enumerate(kinds, start=1)
    ]
    return tag("div", stacked_chart("Events by round", "events", parts), class_="charts")


def _filter(shown: Sequence[EventRecord]) -> Markup:
    participants = sorted({event.participant for event in shown})
    options = [
        tag("option", "everybody", value=""),
        *(tag("option", participant, value=participant) for participant in participants),
    ]
    control = tag("select", options, data_filter="timeline")
    return tag("label", "participant ", control, tag("output", f"{len(shown):,} events"), class_="filter scripted")


def _pill(kind: str) -> Markup:
    mood = "bad" if "excluded" in kind or kind == SITE_REFUSED else "good" if kind in (_RETURNED, "resumed") else "odd"
    return tag("span", _words(kind), class_=f"pill {mood}")


def _words(kind: str) -> str:
    return kind.replace("_", " ")
