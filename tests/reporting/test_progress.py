"""Progress of a run: lines for log files, a live display on a terminal."""

from __future__ import annotations

import io
import math
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from polyfed.reporting.progress import LiveProgress, PlainProgress, RunState, brief_metrics, progress_for, run_display
from polyfed.runs.events import (
    Callback,
    ClientDone,
    ClientStarted,
    Event,
    Incident,
    Measured,
    Preparing,
    RoundComplete,
    RoundStarted,
    RunComplete,
    RunStarted,
    StepStarted,
    Working,
)

RECALLS = [f"{way}_r@{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]


class Now:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def ids(count: int) -> list[str]:
    return [f"{group}-{number:03d}" for group in ("image", "text") for number in range(count // 2)]


def play_rounds(state, rounds: int, cohort: list[str], *, first: int = 1) -> None:
    """Whole rounds, the time of each its number of seconds."""
    for number in range(first, rounds + 1):
        state.handle(RoundStarted(number, cohort))
        state.handle(StepStarted("fit", cohort))
        for client in cohort:
            state.handle(ClientStarted(client, "fit"))
            state.handle(ClientDone(client, "fit", 1.5))
        state.handle(Measured(number, "server", "test", {"r1_sum": 10.0 * number, "gallery_image": 50.0}))
        state.handle(Measured(number, "server", "validation", dict.fromkeys(RECALLS, 5.0)))
        for place, client in enumerate(cohort):
            state.handle(Measured(number, client, "test", {"accuracy": float(place)}))
        state.handle(RoundComplete(number, float(number), 2**20, 2**21))


def mid_round(count: int = 6) -> RunState:
    """Round 5 of 30: the first half has answered but for one that is excluded; one works for 12 s."""
    clock, cohort = Now(), ids(count)
    state = RunState(clock=clock)
    state.handle(RunStarted("scenes-demo", 30, count))
    play_rounds(state, 4, cohort)
    state.handle(RoundStarted(5, cohort))
    state.handle(StepStarted("distil", cohort))
    for client in cohort[: count // 2]:
        state.handle(ClientStarted(client, "distil"))
        state.handle(ClientDone(client, "distil", 2.5))
    state.handle(Incident(5, cohort[1], "client_excluded", "loss [red]is\x1b[31m not finite\nat step 3"))
    state.handle(ClientStarted(cohort[count // 2], "distil"))
    clock.time += 12
    return state


def screen(state: RunState, width: int = 100, *, ascii_only: bool = False) -> str:
    """Display of a state, on a stream for ASCII alone if requested."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii" if ascii_only else "utf-8", errors="strict")
    console = Console(file=stream, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(run_display(state))
    text = captured.get()
    stream.write(text)
    stream.flush()
    assert all(console.measure(Text(line)).maximum <= width for line in text.splitlines())
    return text


def test_metrics_are_the_last_means_over_clients_and_their_changes():
    state = RunState()
    for number, participant, value in ((1, "a", 1.0), (1, "b", math.nan), (1, "c", 3.0), (1, "a", 5.0), (2, "a", 7.0)):
        state.handle(Measured(number, participant, "test", {"accuracy": value, "n": 3}))
    state.handle(Measured(2, "server", "train", {"loss": math.nan}))
    state.handle(Measured(2, "server", "test", {"r@1": 1.0, "r1_sum": 2.0}))
    order = ["server test r1_sum", "server test r@1", "clients test accuracy", "server train loss"]
    assert [" ".join(names) for names, _, _ in state.latest()] == order
    assert [figures for names, *figures in state.latest() if names[2] == "accuracy"] == [[7.0, 3.0]]


def test_a_repeated_event_changes_nothing():
    once, twice = RunState(), RunState()
    for state, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            state.handle(RunStarted("run", 30, 6))
            play_rounds(state, 3, ids(6))
            state.handle(Incident(2, "text-000", "client_excluded", "late"))
    assert (once.bytes, once.elapsed, once.incidents) == (twice.bytes, twice.elapsed, twice.incidents)
    assert once.metrics == twice.metrics
    assert once.bytes == (3 * 2**20, 3 * 2**21)


def test_a_resumed_run_forgets_what_is_done_again():
    state = mid_round()
    state.handle(Incident(5, "text-000", "client_excluded", "late"))
    state.handle(RunStarted("run", 30, 6, done=2))
    assert (state.round, state.clients, state.running) == (2, {}, False)
    assert list(state.complete) == [1, 2]
    assert state.bytes == (2 * 2**20, 2 * 2**21)
    assert state.incidents == {}
    assert list(state.latest()) == []  # of the two latest rounds, which are done again


def test_an_unannounced_step_begins_with_its_first_client():
    state = RunState()
    state.handle(RunStarted("run", 2, 3))
    state.handle(RoundStarted(1, ["a", "b", "c"]))
    state.handle(ClientDone("a", "fit", 1.0))
    state.handle(Incident(1, "b", "client_excluded", "late"))
    state.handle(ClientDone("c", "fit", 1.0))
    state.handle(ClientDone("a", "distil", 1.0))
    assert state.clients == {"a": "done", "c": "waiting", "b": "excluded"}


def test_those_asked_may_be_others_than_the_cohort():
    state = RunState()
    state.handle(RoundStarted(2, ["a", "b"]))
    state.handle(Incident(1, "a", "client_excluded", "late"))  # of another round, so not from this one
    state.handle(Incident(2, "b", "client_excluded", "late"))
    state.handle(StepStarted("evaluate", ["a", "z"]))
    assert list(state.clients.items()) == [("a", "waiting"), ("z", "waiting"), ("b", "excluded")]


def test_replayed_times_count_from_when_they_happened():
    state = RunState(clock=Now())
    state.happened_at(940.0)
    state.handle(RoundStarted(1, ["a"]))
    state.happened_at(950.0)
    state.handle(ClientStarted("a", "fit"))
    assert (state.elapsed, state.work_in_words) == (60.0, "a: fit, 50 s")


def test_in_the_middle_of_a_round() -> None:
    text = screen(mid_round())
    # 1 + 2 + 3 + 4, and 12; this round has had its mean of 2.5, 25 follow
    assert "scenes-demo: round 5 of 30, 22 s elapsed, about 1:02 left" in text
    assert "\n2/6 clients done, 1 working, 1 excluded (distil)\n" in text
    assert "text-000: distil, 12 s" in text
    assert "4.00 MiB up, 8.00 MiB down (last round 1.00, 2.00); 4.00 s per round" in text
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
    assert screen(RunState()) == "polyfed: not begun\n"
    assert "scenes-demo: finished" in screen(finished)


COHORT = ["image-0", "text-1", "paired-0", "paired-1"]


def play(progress: Callback) -> None:
    progress.handle(RunStarted("my [run]", 3, 4))
    for number in (1, 2, 3):
        progress.handle(RoundStarted(number, ["a", "b"]))
        for step in ("fit", "distil"):
            for client in ("a", "b"):
                progress.handle(ClientDone(client, step, 1.5))
        if number == 2:
            progress.handle(Incident(number, "b", "client_excluded", "loss [nan]"))
            progress.handle(ClientDone("b", "assess", 1.0))  # it is back for evaluation, without a reply to average
        progress.handle(Measured(number, "server", "test", {"r1_sum": 10.0 * number, "gallery_image": 50.0}))
        progress.handle(Measured(number, "a", "test", {"accuracy": 20.0}))
        progress.handle(Measured(number, "b", "test", {"accuracy": 30.0}))
        progress.handle(RoundComplete(number, 10.0 * number, replies=1 if number == 2 else 2))
    progress.handle(RunComplete(Path("the report")))
    progress.close()


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=width, color_system=None), stream


def test_the_console_decides():
    displays = [type(progress_for(console(terminal=terminal)[0])) for terminal in (True, False)]
    assert displays == [LiveProgress, PlainProgress]


# ---- lines


def test_plain_progress_is_one_line_a_round_and_event():
    target, stream = console(terminal=False)
    play(PlainProgress(target))
    clients = "clients test: accuracy 25.00"
    assert stream.getvalue().splitlines() == [
        "my [run]: 3 rounds, 4 clients",
        f"round 1/3  10 s  2/2 clients  server test: r1_sum 10.00  {clients}  20 s left",
        "round 2: client excluded: b: loss [nan]",
        f"round 2/3  20 s  1/2 clients  server test: r1_sum 20.00  {clients}  15 s left",
        f"round 3/3  30 s  2/2 clients  server test: r1_sum 30.00  {clients}",
        "the report",
    ]


def test_the_display_has_the_chance_of_each_metric():
    state, (target, stream) = RunState(), console(terminal=False)
    for one, value in (("a", 20.0), ("b", 30.0)):
        state.handle(Measured(1, one, "test", {"accuracy": value, "accuracy_of_constant": value / 2}))
    target.print(run_display(state))
    assert stream.getvalue().splitlines()[-1].split() == ["clients", "test", "accuracy", "25.00", "12.50"]


def lines_by_second(*lines_told: tuple[int, Event], until: int) -> list[tuple[int, str]]:
    """Lines of a log, with the second at which each was printed; events at some seconds."""
    (target, stream), clock, lines = console(terminal=False), [0.0], list[tuple[int, str]]()
    progress = PlainProgress(target, now=lambda: clock[0])
    progress.close()  # this clock is looked at by hand
    for second in range(until + 1):
        clock[0] = float(second)
        for event in [event for when, event in lines_told if when == second]:
            progress.handle(event)
        progress.look()
        lines += [(second, line) for line in stream.getvalue().splitlines()[len(lines) :]]
    return lines


def test_a_log_has_a_long_preparation_soon_and_then_every_ten_seconds():
    decoding = [(second, Preparing("decoding images", 100 * second, 2000)) for second in range(1, 20)]
    waiting = Preparing("waiting for another process, which holds the lock 'a.lock'")
    assert lines_by_second((0, Preparing("reading a")), *decoding, (20, waiting), until=35) == [
        (3, "decoding images: 300 of 2,000 ... 2.00 s"),
        (13, "decoding images: 1,300 of 2,000 ... 12 s"),
        (23, "waiting for another process, which holds the lock 'a.lock' ... 3.00 s"),
        (33, "waiting for another process, which holds the lock 'a.lock' ... 13 s"),
    ]


def test_a_log_is_silent_for_ten_seconds_at_most_while_a_round_goes_on():
    training = [(second, Working("image-0", "fit", second, 30)) for second in range(2, 12)]
    evaluation = (12, Working("server", "test", 0, 0))  # without further events
    lines_told = (0, RunStarted("run", 2, 1)), (1, RoundStarted(1, ["image-0"])), *training, evaluation
    assert lines_by_second(*lines_told, (25, RoundComplete(1, 24.0)), until=30) == [
        (0, "run: 2 rounds, 1 clients"),
        (10, "round 1/2: image-0: fit: 10 of 30 ... 8.00 s"),
        (20, "round 1/2: server: test ... 8.00 s"),
        (25, "round 1/2  24 s  1/1 clients  24 s left"),
    ]


def test_the_clock_of_a_log_is_read_between_events():
    (target, stream), clock = console(terminal=False), [0.0]
    progress = PlainProgress(target, now=lambda: clock[0])
    progress.handle(Preparing("building the model of the server"))
    clock[0] = 60.0
    for _ in range(2000):
        if stream.getvalue():
            break
        time.sleep(0.005)
    progress.close()
    assert stream.getvalue() == "building the model of the server ... 1:00\n"


@pytest.mark.parametrize(
    ("of_clients", "expected"),
    [
        ({}, {}),
        ({"a": {"accuracy": 10.0}, "b": {"accuracy": 20.0, "top5": 40.0}}, {"clients test": "accuracy 15.00"}),
        (
            {"a": {"accuracy": 10.0, "accuracy_of_constant": 5.0}, "b": {"accuracy": 30.0, "accuracy_of_constant": 9.0}}
            | {"c": {"a_to_b_r@1": 1.0, "b_to_a_r@1": 3.0, "r1_sum": 4.0, "loss": 1.0}, "d": {"loss": 2.0}},
            {"clients test": "accuracy 20.00 (chance 7.00, of 2), r1_sum 4.00 of 200 (of 1)"},
        ),
    ],
)
def test_means_are_over_the_clients_that_have_a_metric_with_their_number(of_clients, expected):
    assert brief_metrics({(client, "test"): metrics for client, metrics in of_clients.items()}) == expected


@pytest.mark.parametrize(
    ("begun", "clients", "replies", "message"),
    [
        (RunStarted("run", 2, 5, done=1), ["a"], 1, "run: 2 rounds, 5 clients, resumed after round 1\nround 2/2"),
        (RunStarted("run", 2, 5), [], 0, "no client is asked"),
        (RunStarted("run", 2, 5), [*"abcde"], 1, "1/5 clients"),  # the others are still at work
    ],
)
def test_a_line_has_the_numbers_of_requests_and_replies(begun, clients, replies, message):
    target, stream = console(terminal=False)
    progress, number = PlainProgress(target), begun.done + 1
    for event in (begun, RoundStarted(number, clients), RoundComplete(number, 2.0, replies=replies)):
        progress.handle(event)
    assert message in stream.getvalue()


# ---- the live display


def test_the_participant_at_work_is_named() -> None:
    state = RunState(clock=Now())
    state.handle(Preparing("reading flickr8k train"))
    state.clock.time += 3  # type: ignore[attr-defined]
    assert state.work_in_words == "preparing: reading flickr8k train, 3 s"
    state.handle(Preparing("caching features", 1024, 5000))
    assert state.work_in_words == "preparing: caching features 1,024 of 5,000, 0 s"
    for event in (RunStarted("demo", 12, 7), RoundStarted(1, COHORT), StepStarted("fit", COHORT)):
        state.handle(event)
    state.handle(ClientStarted("image-0", "fit"))
    state.handle(ClientDone("image-0", "fit", 10))
    assert (state.work_in_words, state.step_in_words) == ("", "1/4 clients done (fit)")
    state.handle(Working("server", "distil", 3, 12))
    assert state.work_in_words == "server: distil 3 of 12, 0 s"


def live(width: int = 80, height: int = 24) -> tuple[LiveProgress, io.StringIO]:
    target, stream = console(terminal=True, width=width)
    target.size = (width, height)
    return LiveProgress(target), stream


def test_the_result_replaces_the_display():
    progress, stream = live()
    progress.handle(RunStarted("demo", 12, 7))
    progress.handle(Incident(1, "text-1", "client_excluded", "loss [nan]"))
    progress.handle(Measured(1, "server", "test", {"r1_sum": 30.0}))
    await_text(stream, "r1_sum")
    progress.handle(RoundComplete(1, 1.0))
    progress.handle(RunComplete(Path("the result")))
    text = stream.getvalue()
    for part in ("demo: 12 rounds, 7 clients\n", "round 1: client excluded: text-1: loss [nan]\n"):
        assert part in text
    assert text.rstrip().endswith("the result")
    assert "\x1b[2K" in text[text.rindex("r1_sum") :]  # the display is wiped
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and seen again


def await_text(stream: io.StringIO, text: str) -> None:
    """Wait for a text, as the display is redrawn now and then."""
    end = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.02)


def test_an_interruption_gives_the_terminal_back():
    progress, stream = live()
    before = sys.stdout, sys.stderr
    progress.handle(RunStarted("demo", 3, 2))
    progress.close()
    progress.close()
    assert stream.getvalue().count("\x1b[?25h") == 1
    assert (sys.stdout, sys.stderr) == before
