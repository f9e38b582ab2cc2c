"""The picture of README.md, from differences that a test made up."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from polyfed.reporting.compare import Comparison
from polyfed.reporting.paired import PairedDifference
from test_benchmark_settings import PROGRAMS


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("knowledge_figure")


def difference(label: str, *values: float, figure: str = "server r1_sum, selected by validation") -> PairedDifference:
    """Of seeds 0, 1, ..."""
    return PairedDifference(Comparison(label, (), {}), Comparison("alone", (), {}), figure, dict(enumerate(values)))


MADE_UP = {
    "pairs500": [
        difference("pairs500-creamfl-0", 0.2, 0.9, 0.4),
        difference("pairs500-change-0", 3.1, 5.2, 4.0),
        difference("pairs500-change-0", 9.0, 9.0, figure="paired r1_sum, final"),
        difference("pairs500-procrustes-0", 6.0, 7.5, 7.0),
        difference("pairs500-no-private-twin-0", -2.0, -1.0, 0.0),
        difference("pairs500-of-mine-0", 1.0, 1.5),
    ],
    "pairs1500": [difference("pairs1500-change-0", -1.0, 0.5, 0.2)],
    "clients": [difference("clients-strong-0", 4.0, 5.0)],
}


def test_points_are_means_and_lines_their_intervals(figure: Any) -> None:
    left, right = figure.gains_figure(MADE_UP).axes
    rows = [label.get_text() for label in left.get_yticklabels()]
    control = "change distillation,\nclients hold public pairs only"
    assert rows == [control, "CreamFL", "of-mine", "change distillation", "mean after Procrustes"]  # by their means
    points = [line.get_xdata()[0] for line in left.lines if line.get_marker() == "o"]
    assert points == pytest.approx([-1.0, 0.5, 1.25, 4.1, 20.5 / 3])
    ends = next(line.get_xdata() for line in left.lines if line.get_marker() != "o")
    half = 4.302653 * 1.0 / 3**0.5  # t(2, 0.975) x standard deviation of -2, -1, 0 / sqrt(3)
    assert list(ends) == pytest.approx([-1 - half, -1 + half], rel=1e-5)
    change, procrustes = right.lines[:2]
    assert list(change.get_xdata()) == [500, 1500]
    assert list(change.get_ydata()) == pytest.approx([4.1, -0.1])
    assert list(procrustes.get_xdata()) == [500]


def test_the_file_is_small_and_equal_for_equal_figures(figure: Any, tmp_path: Path) -> None:
    first, second = (figure.draw_gains(MADE_UP, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    assert len(first) <= 60_000
    assert b"mean after Procrustes" in first  # letters, not outlines


@pytest.mark.parametrize("differences", [{}, {"pairs250": MADE_UP["pairs500"]}, {"pairs500": []}])
def test_nothing_measured_is_no_picture(figure: Any, tmp_path: Path, differences: Any) -> None:
    with pytest.raises(ValueError, match="run the table pairs500 with its server-only twin"):
        figure.draw_gains(differences, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())
