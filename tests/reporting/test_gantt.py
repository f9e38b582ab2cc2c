"""The clients of a run in time: bars as written down."""

from __future__ import annotations

from pathlib import Path

from polyfed.federation.timeline_events import TimelineEvent
from polyfed.reporting.run_figures import Work, gantt_charts, run_figures, work_of
from polyfed.runs.events import Measured
from polyfed.runs.records import RunRecords


def event(number: int, client: str, what: str, asked: int, seconds: float) -> TimelineEvent:
    return TimelineEvent(number, client, what, "fit", asked, seconds)


def test_a_bar_is_a_step_from_when_it_was_asked(tmp_path: Path) -> None:
    events = (
        event(1, "b", "started", 1, 0.0),
        event(1, "a", "started", 1, 0.0),
        event(1, "a", "replied", 1, 2.0),
        event(2, "a", "started", 2, 2.0),
        event(2, "b", "replied", 1, 3.0),
        event(3, "a", "dropped", 2, 7.0),
        event(3, "b", "started", 3, 7.0),  # still at work
    )
    measured = [Measured(number, "server", "pace", {"virtual_seconds": at}) for number, at in ((1, 2.0), (2, 3.0))]
    records = RunRecords(tmp_path, measurements=tuple(measured), paced=events)
    (chart,) = gantt_charts(records)
    assert work_of(records) == [
        Work("a", 0.0, 2.0, 1, 1, "fresh"),
        Work("b", 0.0, 3.0, 1, 2, "late"),
        Work("a", 2.0, 7.0, 2, 3, "not used"),
    ]
    assert (chart.rows, chart.moments) == (["a", "b"], [2.0, 3.0])
    svg = run_figures(records)["pace"].svg
    assert "b: asked in round 1, 0.00 s; late in round 2, 3.00 s" in svg


def test_a_run_without_time_has_no_such_figure(tmp_path: Path) -> None:
    assert gantt_charts(RunRecords(tmp_path)) == []
