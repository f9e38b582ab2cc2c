"""What a run shows while it goes on: lines for log files, a picture on a terminal."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_states import Now

from polyfed.reporting.progress import LiveProgress, PlainProgress, RunState, brief_metrics, progress_for
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

COHORT = ["image-0", "text-1", "paired-0", "paired-1"]


def play(progress: Callback, *, done: int = 0) -> None:
    progress.handle(RunStarted("my [run]", 3, 4, done=done))
    for number in range(done + 1, 4):
        progress.handle(RoundStarted(number, ["a", "b"]))
        for step in ("fit", "distil"):
            for client in ("a", "b"):
                progress.handle(ClientDone(client, step, 1.5))
        if number == 2:
            progress.handle(Incident(number, "b", "client_excluded", "loss [nan]"))
        progress.handle(Measured(number, "server", "test", {"r1_sum": 10.0 * number, "gallery_image": 50.0}))
        progress.handle(Measured(number, "a", "test", {"accuracy": 20.0}))
        progress.handle(Measured(number, "b", "test", {"accuracy": 30.0}))
        progress.handle(RoundComplete(number, 10.0 * number))
    progress.handle(RunComplete(Path("the report")))
    progress.close()


def console(*, terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=width, color_system=None), stream


@pytest.mark.parametrize(("terminal", "kind"), [(True, LiveProgress), (False, PlainProgress)])
def test_the_console_decides(terminal, kind):
    assert type(progress_for(console(terminal=terminal)[0])) is kind


# ---- lines


def test_plain_progress_is_one_line_a_round_and_event():
    target, stream = console(terminal=False)
    play(PlainProgress(target))
    clients = "mean of 2 clients test: accuracy 25.00"
    assert stream.getvalue().splitlines() == [
        "my [run]: 3 rounds, 4 clients",
        f"round 1/3  10 s  2/2 clients  server test: r1_sum 10.00  {clients}  20 s left",
        "round 2: client excluded: b: loss [nan]",
        f"round 2/3  20 s  1/2 clients  server test: r1_sum 20.00  {clients}  15 s left",
        f"round 3/3  30 s  2/2 clients  server test: r1_sum 30.00  {clients}",
        "the report",
    ]


def lines_by_second(*told: tuple[int, Event], until: int) -> list[tuple[int, str]]:
    """Lines of a log, with the second at which each was printed; events at some seconds."""
    (target, stream), clock, lines = console(terminal=False), [0.0], list[tuple[int, str]]()
    progress = PlainProgress(target, now=lambda: clock[0])
    progress.close()  # this clock is looked at by hand
    for second in range(until + 1):
        clock[0] = float(second)
        for event in [event for when, event in told if when == second]:
            progress.handle(event)
        progress.look()
        lines += [(second, line) for line in stream.getvalue().splitlines()[len(lines) :]]
    return lines


def test_a_log_tells_of_a_long_preparation_soon_and_then_every_ten_seconds():
    decoding = [(second, Preparing("decoding pictures", 100 * second, 2000)) for second in range(1, 20)]
    waiting = Preparing("waiting for another process, which holds the lock 'a.lock'")
    assert lines_by_second((0, Preparing("reading a")), *decoding, (20, waiting), until=35) == [
        (3, "decoding pictures: 300 of 2,000 ... 2.00 s"),
        (13, "decoding pictures: 1,300 of 2,000 ... 12 s"),
        (23, "waiting for another process, which holds the lock 'a.lock' ... 3.00 s"),
        (33, "waiting for another process, which holds the lock 'a.lock' ... 13 s"),
    ]


def test_a_log_is_silent_for_ten_seconds_at_most_while_a_round_goes_on():
    training = [(second, Working("image-0", "fit", second, 30)) for second in range(2, 12)]
    evaluation = (12, Working("server", "test", 0, 0))  # of which no more is told
    told = (0, RunStarted("run", 2, 1)), (1, RoundStarted(1, ["image-0"])), *training, evaluation
    assert lines_by_second(*told, (25, RoundComplete(1, 24.0)), until=30) == [
        (0, "run: 2 rounds, 1 clients"),
        (10, "round 1/2: image-0: fit: 10 of 30 ... 8.00 s"),
        (20, "round 1/2: server: test ... 8.00 s"),
        (25, "round 1/2  24 s  1/1 clients  24 s left"),
    ]


def test_the_clock_of_a_log_is_looked_at_while_nothing_is_told():
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
        (
            {"a": {"accuracy": 10.0}, "b": {"accuracy": 20.0, "top5": 40.0}},
            {"mean of 2 clients test": "accuracy 15.00, top5 40.00 (of 1)"},
        ),
        (
            {"a": {"accuracy": 10.0}, "b": {"accuracy": 30.0}, "c": {"r1_sum": 4.0, "loss": 1.0}, "d": {"loss": 2.0}},
            {"mean of 4 clients test": "accuracy 20.00 (of 2), r1_sum 4.00 (of 1), loss 1.50 (of 2)"},
        ),
    ],
)
def test_means_are_over_the_clients_that_have_a_metric_and_say_over_how_many(of_clients, expected):
    assert brief_metrics({(client, "test"): metrics for client, metrics in of_clients.items()}) == expected


@pytest.mark.parametrize(
    ("begun", "clients", "measured", "said"),
    [
        (RunStarted("run", 2, 5, done=1), ["a"], {}, "run: 2 rounds, 5 clients, resumed after round 1\nround 2/2"),
        (RunStarted("run", 2, 5), [], {}, "no client is asked"),
        (RunStarted("run", 2, 5), [*"abcde"], {"replies": 1.0}, "1/5 clients"),  # the others are still at work
    ],
)
def test_a_line_says_how_many_were_asked_and_answered(begun, clients, measured, said):
    target, stream = console(terminal=False)
    progress, number = PlainProgress(target), begun.done + 1
    for event in (begun, RoundStarted(number, clients), Measured(number, "server", "pace", measured)):
        progress.handle(event)
    progress.handle(RoundComplete(number, 2.0))
    assert said in stream.getvalue()


# ---- the picture


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


def test_the_result_takes_the_place_of_the_picture():
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
    assert "\x1b[2K" in text[text.rindex("r1_sum") :]  # the picture is wiped
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, and seen again


def await_text(stream: io.StringIO, text: str) -> None:
    """The picture is drawn anew four times a second."""
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


@pytest.mark.parametrize("size", [(20, 5), (60, 24), (200, 60)])
def test_a_terminal_of_any_size_can_show_it(size):
    progress, stream = live(*size)
    progress.handle(RunStarted("demo", 3, 2))
    play(progress)
    assert "the report" in stream.getvalue()


def test_what_is_printed_meanwhile_stands_above(capsys):
    progress = LiveProgress(Console(force_terminal=True, width=80, height=24, color_system=None))
    progress.handle(RunStarted("demo", 3, 2))
    sys.stdout.write("a stray line\n")
    progress.close()
    assert "a stray line\n" in capsys.readouterr().out
