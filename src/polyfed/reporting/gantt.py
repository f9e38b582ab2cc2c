"""Who was at work when: the clients of a run in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from polyfed.federation.timeline_events import REPLIED, STARTED
from polyfed.reporting.charts import Chart, LegendEntry, chart_colour, short_name
from polyfed.reporting.figures import hover_id, legend_below
from polyfed.reporting.tables import format_number
from polyfed.runs.records import PACE, SERVER, RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS, _MOST_ROWS = 600, 60
_KINDS = {"fresh": 1, "late": 2, "not used": 0}


class Work(NamedTuple):
    """A step of a client: when it was asked and when it had replied, in which rounds, and what came of it."""

    client: str
    begun: float
    ended: float
    asked: int
    used: int
    kind: str


@dataclass(frozen=True)
class GanttChart(Chart):
    """A row a client, a bar a step, a line a server step.

    Attributes:
        rows: clients, from above.
        work: bars.
        steps: times of the server's steps.
    """

    rows: Sequence[str]
    work: Sequence[Work]
    steps: Sequence[float]

    @property
    def inches(self) -> tuple[float, float]:
        return 12.0, 1.2 + 0.26 * len(self.rows)

    def draw(self, axes: Axes) -> None:
        places = {client: place for place, client in enumerate(self.rows)}
        for one in self.work:
            colour = chart_colour(_KINDS[one.kind])
            (bar,) = axes.barh(places[one.client], one.ended - one.begun, left=one.begun, height=0.7, color=colour)
            begun, ended = f"{format_number(one.begun)} s", f"{format_number(one.ended)} s"
            text = f"{one.client}: asked in round {one.asked}, {begun}; {one.kind} in round {one.used}, {ended}"
            bar.set(edgecolor="white", linewidth=0.6, gid=hover_id(text))
        for step in self.steps:
            axes.axvline(step, color=chart_colour(7), linewidth=0.5, alpha=0.5)
        axes.set(xlabel="seconds since the run began", ylim=(len(self.rows) - 0.4, -0.6))
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(self.rows)), [short_name(client) for client in self.rows])
        axes.grid(visible=False, axis="y")
        legend_below(axes, columns=4, handles=[entry.handle() for entry in _LEGEND])


_LEGEND = (*(LegendEntry(kind, colour, "area") for kind, colour in _KINDS.items()), LegendEntry("server step", 7))


def gantt_charts(records: RunRecords) -> list[GanttChart]:
    """The clients of a run in time, none where it had none; of a long run its beginning."""
    work = list(_work(records))
    clients = list(dict.fromkeys(one.client for one in sorted(work, key=lambda one: _order(records, one.client))))
    rows, shown = clients[:_MOST_ROWS], [one for one in work if one.client in clients[:_MOST_ROWS]][:_MOST_BARS]
    if not shown:
        return []
    last = max(one.ended for one in shown)
    steps = [time for time in records.series(SERVER, "virtual_seconds", PACE).values() if time <= last]
    of_all = "" if len(shown) == len(work) else f" (the first {len(shown):,} of {len(work):,} steps)"
    return [GanttChart(f"Clients at work{of_all}", rows, shown, steps)]


def _work(records: RunRecords) -> Iterator[Work]:
    begun: dict[tuple[str, int], float] = {}  # of a round with several steps the last
    for event in records.paced:
        key = event.client, event.asked
        if event.event == STARTED:
            begun[key] = event.seconds
        elif key in begun:
            used = "fresh" if event.asked == event.round else "late"
            kind = used if event.event == REPLIED else "not used"
            yield Work(event.client, begun[key], event.seconds, event.asked, event.round, kind)


def _order(records: RunRecords, client: str) -> tuple[int, str]:
    known = list(records.holdings)
    return (known.index(client) if client in known else len(known)), client
