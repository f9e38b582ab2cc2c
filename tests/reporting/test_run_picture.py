"""Pictures of a run in terminals of any width."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_states import mid_round, screen

from polyfed.reporting.progress import RunState
from polyfed.runs.events import RunComplete


def test_before_anything_is_known() -> None:
    assert screen(RunState()) == "polyfed: not begun\n"


def test_in_the_middle_of_a_round() -> None:
    text = screen(mid_round())
    # 1 + 2 + 3 + 4, and 12; this round has had its mean of 2.5, 25 follow
    assert "scenes-demo: round 5 of 30, 22 s elapsed, about 1:02 left" in text
    assert "\n2/6 clients done, 1 working, 1 excluded (distil)\n" in text
    assert "text-000: distil, 12 s" in text
    assert "4.00 MiB up, 8.00 MiB down (last round 1.00, 2.00); 4.00 s a round" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["server", "test", "r1_sum", "40.00", "+10.00"] in lines
    assert ["clients", "test", "accuracy", "2.50", "+0.00"] in lines
    assert "gallery_image" not in text
    # an excluded client is shown with its reason, and without control characters
    assert "round 5: client excluded: image-001: loss [red]is [31m not finite at step 3" in text
    assert "\x1b" not in text


def test_of_a_thousand_clients_counts_are_shown() -> None:
    text = screen(mid_round(1000))
    assert "499/1000 clients done, 1 working, 1 excluded (distil)" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize("width", [1, 10, 40, 80, 150])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_any_width_and_state_can_be_drawn(width: int, ascii_only: bool) -> None:
    finished = mid_round()
    finished.handle(RunComplete(Path()))
    for state in (RunState(), mid_round(), mid_round(1000), finished):
        screen(state, width, ascii_only=ascii_only)
    assert "scenes-demo: finished" in screen(finished)
