"""What the figures of a run show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from polyfed.federation.timeline_events import TimelineEvent
from polyfed.reporting.run_figures import Work, gantt_charts, run_figures, work_of
from polyfed.runs.events import Measured
from polyfed.runs.records import RunRecords


@pytest.fixture(scope="module")
def records(made_up_run: Path) -> RunRecords:
    return RunRecords.load(made_up_run)


def axes_of(records: RunRecords, name: str) -> list[Axes]:
    return run_figures(records)[name].draw().axes


def drawn_lines(axes: Axes) -> set[tuple[float, ...]]:
    return {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines if len(line.get_xdata())}


def test_an_empty_run_has_no_plots(tmp_path):
    assert run_figures(RunRecords.load(tmp_path)) == {}


def test_server_curves_show_the_recorded_values_and_chance(records):
    first, second, total = axes_of(records, "server")
    assert first.get_title(loc="left") == "image to text, gallery 500"
    assert second.get_title(loc="left") == "text to image, gallery 100"
    for kind in ("test", "validation"):
        assert tuple(records.series("server", "image_to_text_r@5", kind).values()) in drawn_lines(first)
        assert tuple(records.series("server", "r1_sum", kind).values()) in drawn_lines(total)
    assert (5.0,) * 12 in {tuple(np.round(values, 9)) for values in drawn_lines(second)}
    assert total.get_xlabel() == "round"
    legend = first.get_legend()
    lines = zip(legend.get_texts(), legend.get_lines(), strict=True)
    styles = {text.get_text(): line.get_linestyle() for text, line in lines}
    assert styles == {"test": "-", "validation": "--", "chance": ":"} | dict.fromkeys(("R@1", "R@5", "R@10"), "-")


def paced(number: int, client: str, what: str, asked: int, seconds: float) -> TimelineEvent:
    return TimelineEvent(number, client, what, "fit", asked, seconds)


def test_a_bar_is_a_step_from_when_it_was_asked(tmp_path: Path) -> None:
    events = (
        paced(1, "b", "started", 1, 0.0),
        paced(1, "a", "started", 1, 0.0),
        paced(1, "a", "replied", 1, 2.0),
        paced(2, "a", "started", 2, 2.0),
        paced(2, "b", "replied", 1, 3.0),
        paced(3, "a", "dropped", 2, 7.0),
        paced(3, "b", "started", 3, 7.0),  # still at work
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
