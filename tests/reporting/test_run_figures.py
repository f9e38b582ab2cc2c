"""What the figures of a run show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from polyfed.reporting.run_figures import run_figures
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
