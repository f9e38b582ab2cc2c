"""What the figures of a run show, read off matplotlib's axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from polyfed.reporting.run_figures import run_figures
from polyfed.runs.records import RunRecords


@pytest.fixture(scope="module")
def records(made_up_run: Path) -> RunRecords:
    return RunRecords.load(made_up_run)


def axes_of(records: RunRecords, name: str) -> list[Axes]:
    return run_figures(records)[name].draw().axes


def drawn_lines(axes: Axes) -> set[tuple[float, ...]]:
    return {tuple(np.asarray(line.get_ydata()).tolist()) for line in axes.lines if len(line.get_xdata())}


def bars_of(axes: Axes) -> list[Rectangle]:
    """All rectangles but the transparent ones that carry text."""
    return [bar for bar in axes.patches if bar.get_alpha() != 0]


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


def test_traffic_is_stacked_in_mib(records):
    rounds, seconds = axes_of(records, "traffic")
    heights = [bar.get_height() for bar in bars_of(rounds)]
    assert heights[:12] == pytest.approx([9 * 3_000_100 / 2**20] * 12)
    assert [bar.get_y() for bar in bars_of(rounds)[12:]] == pytest.approx(heights[:12])
    assert len(bars_of(seconds)) == 12


def test_bytes_by_client_are_those_of_the_ledger(records):
    *_, clients = axes_of(records, "bytes")
    sizes = [bar.get_width() for bar in bars_of(clients)]
    assert sizes == pytest.approx([12 * 3_000_100 / 2**20, 12 * 1_500_100 / 2**20] * 9)
