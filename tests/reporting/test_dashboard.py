"""The dashboard: pictures of a run on screens of any size, and the terminal."""

from __future__ import annotations

import io
import logging
import math
import random
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_states import mid_round, play, screen

from polyfed.reporting.dashboard import DashboardProgress
from polyfed.reporting.run_picture import chosen_curves, sparkline
from polyfed.reporting.run_state import RunState
from polyfed.runs.events import RoundStarted, RunComplete, RunStarted
from polyfed.runs.records import RunRecords

# ---- pictures


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
    assert "▶ text-000  distil 12 s" in text
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
    assert "> text-000  distil 12 s" in text


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


# ---- the terminal


def terminal() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=80, height=24, color_system=None), stream


def await_picture(stream: io.StringIO, text: str) -> None:
    """The picture is drawn anew twice a second."""
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.02)


def test_the_terminal_is_taken_and_given_back_with_the_report_below():
    console, stream = terminal()
    progress = DashboardProgress(console)
    progress.handle(RunStarted("demo", 3, 2))
    play(progress, 3, ["a-0", "a-1"])
    await_picture(stream, "round 3 of 3")
    progress.handle(RunComplete(Path("the report")))
    text = stream.getvalue()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and seen again
    assert text.index("\x1b[?1049l") < text.index("the report")


def test_an_exception_gives_the_terminal_back():
    console, stream = terminal()
    progress, before = DashboardProgress(console), (sys.stdout, sys.stderr)
    handlers = list(logging.getLogger("polyfed").handlers)
    try:
        progress.handle(RunStarted("demo", 3, 2))
        with pytest.raises(ZeroDivisionError):
            1 / 0  # noqa: B018
    finally:
        progress.close()
        progress.close()
    assert stream.getvalue().count("\x1b[?1049l") == 1
    assert (sys.stdout, sys.stderr) == before
    assert logging.getLogger("polyfed").handlers == handlers


def test_a_changed_size_is_followed():
    console, stream = terminal()
    progress = DashboardProgress(console)
    progress.handle(RunStarted("demo", 3, 2))
    try:
        for width, height in ((30, 8), (3, 2), (200, 60)):
            console.size = (width, height)
            progress.handle(RunStarted("demo", 3, 2))  # draws at once
        play(progress, 2, ["a-0"])
    finally:
        progress.close()
    assert "─" * 150 in stream.getvalue()


def test_warnings_are_events_and_are_printed_at_the_end():
    console, stream = terminal()
    progress = DashboardProgress(console)
    progress.handle(RunStarted("demo", 3, 2))
    try:
        logging.getLogger("polyfed.data").warning("the cache [is] slow")
        logging.getLogger("polyfed.runs.session").warning("told as an event already")
        await_picture(stream, "round 0: warning: polyfed: the cache [is] slow")
    finally:
        progress.close()
    logging.getLogger("polyfed.data").warning("nobody looks any more")
    _, after = stream.getvalue().split("\x1b[?1049l")
    assert after.strip() == "warning: the cache [is] slow"
    assert list(progress.state.events) == [(0, "polyfed", "warning", "the cache [is] slow")]


def test_what_is_printed_meanwhile_appears_afterwards(capsys):
    progress = DashboardProgress(Console(force_terminal=True, width=80, height=24, color_system=None))
    progress.handle(RunStarted("demo", 3, 2))
    try:
        sys.stdout.write("a stray line\n")
        sys.stderr.write("Traceback\n")
        logging.getLogger("polyfed.data").warning("told [twice]")
        sys.stderr.write("warning: told [twice]\n")
    finally:
        progress.close()
    out, err = capsys.readouterr()
    before, after = out.split("\x1b[?1049l")
    assert "a stray line" not in before
    assert "demo" in before
    assert after == "a stray line\n"
    assert err == "Traceback\nwarning: told [twice]\n"


def test_a_watched_run_is_shown_before_it_tells_anything(run_folder: Path):
    console, stream = terminal()
    progress = DashboardProgress(console, RunRecords.load(run_folder))
    progress.show()
    progress.show()
    progress.close()
    assert "round 12 of 12" in stream.getvalue()
