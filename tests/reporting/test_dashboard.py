from __future__ import annotations

import io
import logging
import math
import random
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from polyfed.reporting.dashboard import DashboardProgress
from polyfed.reporting.records import RunRecords
from polyfed.reporting.run_picture import Picture, chosen_curves, plain, sparkline
from polyfed.reporting.run_state import Curve, RunState

RECALLS = [f"{way}_r@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def ids(count: int) -> list[str]:
    return [f"{group}-{number:03d}" for group in ("image", "text") for number in range(count // 2)]


def play(state, rounds: int, cohort: list[str], *, first: int = 1) -> None:
    """Whole rounds, the time of each its number of seconds."""
    for number in range(first, rounds + 1):
        state.round_started(number, cohort)
        state.step_started("fit", cohort)
        for client in cohort:
            state.client_started(client, "fit")
            state.client_done(client, "fit", 1.5)
        state.evaluated(number, "server", "test", {"r1_sum": 10.0 * number, "gallery_image": 50.0})
        state.evaluated(number, "server", "validation", dict.fromkeys(RECALLS, 5.0))
        for place, client in enumerate(cohort):
            state.evaluated(number, client, "test", {"accuracy": float(place)})
        state.traffic(number, 2**20, 2**21)
        state.round_finished(number, float(number))


def mid_round(count: int = 6) -> RunState:
    """Round 5 of 30: the first half has answered but for one that is excluded; one works for 12 s."""
    clock, cohort = Now(), ids(count)
    state = RunState(clock=clock)
    state.run_started("scenes-demo", 30, count)
    play(state, 4, cohort)
    state.round_started(5, cohort)
    state.step_started("distil", cohort)
    for client in cohort[: count // 2]:
        state.client_started(client, "distil")
        state.client_done(client, "distil", 2.5)
    state.event(5, cohort[1], "client_excluded", "loss [red]is\x1b[31m not finite\nat step 3")
    state.client_started(cohort[count // 2], "distil")
    clock.time += 12
    return state


def screen(state: RunState, width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii" if ascii_only else "utf-8", errors="strict")
    console = Console(file=stream, width=width, height=height, force_terminal=True, color_system=None)
    options = console.options.update(height=height)
    lines = console.render_lines(Picture(state), options, pad=False)
    for line in lines:
        stream.write("".join(segment.text for segment in line) + "\n")
    stream.flush()
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(text) == height
    assert all(console.measure(Text(line)).maximum <= width for line in text)
    return text


# ---- pictures


def test_before_anything_is_known():
    text = "\n".join(screen(RunState(), 80, 24))
    for part in ("polyfed", "not begun", "nothing is measured yet", "no cohort yet", "0.00 MiB", "none"):
        assert part in text


def test_in_the_middle_of_a_round():
    text = "\n".join(screen(mid_round(), 120, 36))
    assert "scenes-demo" in text
    assert "round 5 of 30  22 s elapsed, 53 s left" in text  # 1 + 2 + 3 + 4, and 12; 26 rounds of 2.5 less 12
    assert "round 5  distil  2/6 done  1 excluded" in text
    assert "✓ image-000  2.50 s" in text
    assert "▶ text-000  distil 12 s" in text
    assert "· text-001  waiting" in text
    assert " r1_sum             ▁▃▆█ 40.00 +10.00" in text
    assert " accuracy           ▄▄▄▄  2.50  +0.00" in text
    assert "gallery_image" not in text
    assert "↑ 4.00  ↓ 8.00 MiB  (last round 1.00, 2.00)    ▁▃▆█ 4.00 s a round" in text


def test_an_excluded_client_is_shown_with_its_reason_and_without_control_characters():
    text = "\n".join(screen(mid_round(), 120, 36))
    assert "✗ image-001  loss [red]is [31m not finite at step 3" in text
    assert "round 5: client excluded: image-001: loss [red]is [31m not finite at step 3" in text
    assert "\x1b" not in text


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


def test_sixty_columns_have_the_cohort_below_the_metrics():
    lines = screen(mid_round(), 60, 30)
    row = {word: next(k for k, line in enumerate(lines) if word in line) for word in ("r1_sum", "▶ text-000", "MiB")}
    assert row["r1_sum"] < row["▶ text-000"] < row["MiB"]
    assert all(line[0] in "╭│╰" and line[-1] in "╮│╯" for line in lines)


def test_eighty_columns_show_metrics_and_cohort_beside_each_other():
    lines = screen(mid_round(), 80, 24)
    assert any("server test" in line and "image-000" in line for line in lines)


def test_any_size_and_state_can_be_drawn():
    draw = random.Random(0)
    finished = mid_round()
    finished.run_finished("")
    for state in (RunState(), mid_round(), mid_round(1000), finished):
        for _ in range(25):
            screen(state, draw.randint(1, 150), draw.randint(1, 50), ascii_only=draw.random() < 0.3)


def test_a_terminal_without_unicode_gets_ascii_alone():
    text = "\n".join(screen(mid_round(), 80, 24, ascii_only=True))
    assert text.isascii()
    assert "> text-000  distil 12 s" in text


def test_the_end_is_told():
    state = mid_round()
    state.run_finished("")
    assert "finished  10 s elapsed" in "\n".join(screen(state, 80, 24))


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


def test_curves_are_chosen_by_their_rank_within_party_and_kind():
    known = [("server", "train", "loss"), ("clients", "test", "accuracy")]
    known += [("server", "test", name) for name in ("r1_sum", "r1", "r5")]
    assert chosen_curves(known, 1) == {}
    assert chosen_curves(known, 5) == {("server", "test"): [known[2]], ("clients", "test"): [known[1]]}
    assert chosen_curves(known, 7) == {
        ("server", "test"): [known[2], known[3]],
        ("clients", "test"): [known[1]],
        ("server", "train"): [known[0]],
    }
    assert sum(map(len, chosen_curves(known, 99).values())) == 5


def test_main_metrics_come_first_and_tests_before_others():
    known = [("server", "other", "x"), *(("clients", "test", name) for name in ("r1_sum", "r@1", "accuracy"))]
    assert chosen_curves(known, 9) == {
        ("clients", "test"): [known[1], known[3], known[2]],
        ("server", "other"): [known[0]],
    }


def test_groups_are_ids_without_their_numbers():
    state = RunState()
    state.round_started(1, ["x-ray-07", "x-ray-11", "text", "site-a"])
    assert {group: list(found) for group, found in state.groups().items()} == {
        "x-ray": ["x-ray-07", "x-ray-11"],
        "text": ["text"],
        "site-a": ["site-a"],
    }


def test_plain():
    assert plain("a\x1b]0;x\x07\r\n\tb\u202e c") == "a ]0;x b c"


# ---- what is known


def test_a_curve_is_the_mean_of_the_finite_values_of_a_round():
    curve = Curve()
    for party, value in (("a", 1.0), ("b", math.nan), ("c", 3.0), ("a", 5.0)):
        curve.add(1, party, value)
    curve.add(2, "a", math.nan)
    curve.add(3, "a", 7.0)
    values = curve.by_round()
    assert (values[1], values[3]) == (4.0, 7.0)
    assert math.isnan(values[2])
    curve.cut(1)
    assert curve.by_round() == {1: 4.0}


def test_told_twice_is_as_told_once():
    once, twice = RunState(), RunState()
    for state, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            state.run_started("run", 30, 6)
            play(state, 3, ids(6))
            state.event(2, "text-000", "client_excluded", "late")
    assert (once.bytes, once.elapsed, once.events) == (twice.bytes, twice.elapsed, twice.events)
    assert {key: curve.by_round() for key, curve in once.curves.items()} == {
        key: curve.by_round() for key, curve in twice.curves.items()
    }
    assert once.bytes == (3 * 2**20, 3 * 2**21)


def test_a_resumed_run_forgets_what_is_done_again():
    state = mid_round()
    state.event(5, "text-000", "client_excluded", "late")
    state.run_started("run", 30, 6, done=2)
    assert (state.round, state.clients, state.running) == (2, {}, False)
    assert list(state.seconds) == [1, 2]
    assert state.bytes == (2 * 2**20, 2 * 2**21)
    assert state.events == {}
    assert list(state.curves["server", "test", "r1_sum"].by_round()) == [1, 2]


def test_a_step_that_nobody_announced_begins_with_its_first_client():
    state = RunState()
    state.run_started("run", 2, 3)
    state.round_started(1, ["a", "b", "c"])
    state.client_done("a", "fit", 1.0)
    state.event(1, "b", "client_excluded", "late")
    state.client_done("c", "fit", 1.0)
    state.client_done("a", "distil", 1.0)
    assert {client: found.status for client, found in state.clients.items()} == {
        "a": "done",
        "c": "waiting",
        "b": "excluded",
    }


def test_those_asked_may_be_others_than_the_cohort():
    state = RunState()
    state.round_started(1, ["a", "b"])
    state.event(1, "b", "client_excluded", "late")
    state.step_started("evaluate", ["a", "z"])
    assert list(state.clients) == ["a", "z", "b"]


def test_an_event_of_another_round_excludes_nobody_from_this_one():
    state = RunState()
    state.round_started(2, ["a"])
    state.event(1, "a", "client_excluded", "late")
    assert state.clients["a"].status == "waiting"


def test_replayed_times_count_from_when_they_happened():
    clock = Now()
    state = RunState(clock=clock)
    state.happened_at(940.0)
    state.round_started(1, ["a"])
    state.happened_at(950.0)
    state.client_started("a", "fit")
    assert (state.elapsed, state.working_for(state.clients["a"])) == (60.0, 50.0)


def test_nothing_tells_how_long_the_first_round_takes():
    state = RunState()
    state.run_started("run", 5, 1)
    assert state.left is None


def test_records_of_a_run_are_the_state_it_is_in(run_folder):
    records = RunRecords.load(run_folder)
    state = RunState.of(records)
    assert (state.name, state.round, state.rounds, state.total_clients) == ("run", 12, 12, 9)
    assert sum(state.bytes) == records.total_bytes()
    assert state.curves["server", "test", "r1_sum"].by_round() == records.series("server", "r1_sum")
    assert [event[0] for event in state.events] == [3, 5]
    assert "client excluded: text-1: no answer in 60 s" in "\n".join(screen(state, 80, 24))


# ---- the terminal


def terminal() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=True, width=80, height=24, color_system=None), stream


def test_the_terminal_is_taken_and_given_back_with_the_report_below():
    console, stream = terminal()
    progress = DashboardProgress(console)
    progress.run_started("demo", 3, 2)
    play(progress, 3, ["a-0", "a-1"])
    progress._live.refresh()
    progress.run_finished(Text("the report"))
    text = stream.getvalue()
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and seen again
    assert "round 3 of 3" in text
    assert text.index("\x1b[?1049l") < text.index("the report")


def test_an_exception_gives_the_terminal_back():
    console, stream = terminal()
    progress, before = DashboardProgress(console), (sys.stdout, sys.stderr)
    try:
        progress.run_started("demo", 3, 2)
        with pytest.raises(ZeroDivisionError):
            1 / 0  # noqa: B018
    finally:
        progress.close()
        progress.close()
    assert stream.getvalue().count("\x1b[?1049l") == 1
    assert (sys.stdout, sys.stderr) == before
    assert progress._warnings not in logging.getLogger("polyfed").handlers


def test_a_changed_size_is_followed():
    console, stream = terminal()
    progress = DashboardProgress(console)
    progress.run_started("demo", 3, 2)
    try:
        for width, height in ((30, 8), (3, 2), (200, 60)):
            console.size = (width, height)
            progress._live.refresh()
        play(progress, 2, ["a-0"])
    finally:
        progress.close()
    assert "─" * 150 in stream.getvalue()


def test_warnings_are_events_and_are_printed_at_the_end():
    console, stream = terminal()
    progress = DashboardProgress(console)
    progress.run_started("demo", 3, 2)
    try:
        logging.getLogger("polyfed.data").warning("the cache [is] slow")
        logging.getLogger("polyfed.session").warning("told as an event already")
        progress._live.refresh()
    finally:
        progress.close()
    logging.getLogger("polyfed.data").warning("nobody looks any more")
    before, after = stream.getvalue().split("\x1b[?1049l")
    assert "round 0: warning: polyfed: the cache [is] slow" in before
    assert after.strip() == "warning: the cache [is] slow"
    assert list(progress.state.events) == [(0, "polyfed", "warning", "the cache [is] slow")]


def test_what_is_printed_meanwhile_appears_afterwards(capsys):
    progress = DashboardProgress(Console(force_terminal=True, width=80, height=24, color_system=None))
    progress.run_started("demo", 3, 2)
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
