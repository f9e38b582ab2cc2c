"""Pictures of a run on screens of any size."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from run_states import mid_round, screen

from polyfed.reporting.run_picture import chosen_curves, sparkline
from polyfed.reporting.run_state import RunState
from polyfed.runs.events import RoundStarted, RunComplete


def test_before_anything_is_known():
    text = "\n".join(screen(RunState(), 80, 24))
    for part in ("polyfed", "not begun", "nothing is measured yet", "no cohort yet", "0.00 MiB", "none"):
        assert part in text


def test_in_the_middle_of_a_round():
    text = "\n".join(screen(mid_round(), 120, 36))
    assert "scenes-demo" in text
    # 1 + 2 + 3 + 4, and 12; this round has had its mean of 2.5, 25 follow
    assert "round 5 of 30  22 s elapsed, about 1:02 left" in text
    assert "round 5  distil  2/6 done  1 excluded" in text
    assert "✓ image-000  2.50 s" in text
    assert "▶ text-000  12 s distilling" in text
    assert "· text-001  waiting" in text
    assert " r1_sum             ▁▃▆█ 40.00 +10.00" in text
    assert " accuracy           ▄▄▄▄  2.50  +0.00" in text
    assert "gallery_image" not in text
    # an excluded client is shown with its reason, and without control characters
    assert "✗ image-001  loss [red]is [31m not finite at step 3" in text
    assert "round 5: client excluded: image-001: loss [red]is [31m not finite at step 3" in text
    assert "\x1b" not in text
    assert "↑ 4.00  ↓ 8.00 MiB  (last round 1.00, 2.00)    ▁▃▆█ 4.00 s a round" in text


def test_of_a_thousand_clients_counts_and_the_noteworthy_are_shown():
    lines = screen(mid_round(1000), 100, 30)
    text = "\n".join(lines)
    assert "round 5  distil  499/1000 done  1 excluded" in text
    assert "image: 499/500 done, 1 excluded" in text
    assert "text: 0/500 done, 1 working" in text
    rows = [line for line in lines if any(sign in line for sign in "✗▶✓")]
    assert "✗ image-001" in rows[0]
    assert "▶ text-000" in rows[1]
    assert "waiting" not in text


def test_a_group_that_does_not_fit_is_counted():
    state = mid_round()
    state.clients = {f"group{k}-{number}": state.clients["text-002"] for k in range(9) for number in range(9)}
    text = "\n".join(screen(state, 100, 24))
    assert "group4: 0/9 done" in text
    assert "group5: " not in text
    assert "... 4 more groups" in text
    assert "group8: 0/9 done" in "\n".join(screen(state, 100, 40))


def test_sixty_columns_have_the_cohort_below_the_metrics_and_eighty_beside_them():
    lines = screen(mid_round(), 60, 30)
    row = {word: next(k for k, line in enumerate(lines) if word in line) for word in ("r1_sum", "▶ text-000", "MiB")}
    assert row["r1_sum"] < row["▶ text-000"] < row["MiB"]
    assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in lines)
    assert any("server test" in line and "image-000" in line for line in screen(mid_round(), 80, 24))


def test_any_size_and_state_can_be_drawn():
    draw = random.Random(0)
    finished = mid_round()
    finished.handle(RunComplete(Path()))
    assert "finished  10 s elapsed" in "\n".join(screen(finished, 80, 24))
    for state in (RunState(), mid_round(), mid_round(1000), finished):
        for _ in range(25):
            screen(state, draw.randint(1, 150), draw.randint(1, 50), ascii_only=draw.random() < 0.3)


def test_a_terminal_without_unicode_gets_ascii_alone():
    text = "\n".join(screen(mid_round(), 80, 24, ascii_only=True))
    assert text.isascii()
    assert "> text-000  12 s distilling" in text


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 5, ""),
        ([1.0], 0, ""),
        ([3.0], 5, "▄"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, "▁▂▃▄▅▆▇█"),
        ([0.0, 0.0, 7.0, 7.0], 2, "▁█"),
        ([0.0, math.nan, math.inf, 7.0], 4, "▁??█"),
        ([math.nan], 4, "?"),
    ],
)
def test_sparklines(values, width, expected):
    assert sparkline(values, width) == expected


SERVER_TEST = [("server", "test", name) for name in ("r1_sum", "r1", "r5")]
ACCURACY, LOSS = ("clients", "test", "accuracy"), ("server", "train", "loss")


@pytest.mark.parametrize(
    ("curves", "rows", "expected"),
    [
        ([LOSS, ACCURACY, *SERVER_TEST], 1, []),
        ([LOSS, ACCURACY, *SERVER_TEST], 5, [SERVER_TEST[:1], [ACCURACY]]),
        ([LOSS, ACCURACY, *SERVER_TEST], 7, [SERVER_TEST[:2], [ACCURACY], [LOSS]]),
        ([LOSS, ACCURACY, *SERVER_TEST], 99, [SERVER_TEST, [ACCURACY], [LOSS]]),
        # main metrics come first, and tests before other kinds
        (
            [("server", "other", "x"), *(("clients", "test", name) for name in ("r1_sum", "r@1", "accuracy"))],
            9,
            [[("clients", "test", name) for name in ("r1_sum", "accuracy", "r@1")], [("server", "other", "x")]],
        ),
    ],
)
def test_curves_are_chosen_by_their_rank_within_party_and_kind(curves, rows, expected):
    assert chosen_curves(curves, rows) == {keys[0][:2]: keys for keys in expected}


def test_groups_are_ids_without_their_numbers():
    state = RunState()
    state.handle(RoundStarted(1, ["x-ray-07", "x-ray-11", "text", "site-a"]))
    assert {group: list(clients) for group, clients in state.groups().items()} == {
        "x-ray": ["x-ray-07", "x-ray-11"],
        "text": ["text"],
        "site-a": ["site-a"],
    }
