from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from polyfed.reporting.progress import BarProgress, PlainProgress, progress_for, summaries
from polyfed.runs.events import (
    Callback,
    ClientDone,
    Incident,
    Measured,
    Preparing,
    RoundComplete,
    RoundStarted,
    RunComplete,
    RunStarted,
)


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


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100, color_system=None), stream


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


def test_plain_progress_names_a_preparation_once_if_it_takes_long():
    target, stream = console(terminal=False)
    times = iter(range(100))
    progress = PlainProgress(target, now=lambda: float(next(times)))
    progress.handle(Preparing("reading a", 0, 0))
    for done in range(10):
        progress.handle(Preparing("decoding pictures", 100 * done, 2000))
    assert stream.getvalue() == "decoding pictures: 400 of 2,000 ...\n"


def test_plain_progress_of_a_resumed_run():
    target, stream = console(terminal=False)
    play(PlainProgress(target), done=2)
    assert stream.getvalue().startswith("my [run]: 3 rounds, 4 clients, resumed after round 2\nround 3/3")


def test_a_callback_may_care_for_nothing():
    play(Callback())


@pytest.mark.parametrize(("terminal", "kind"), [(True, BarProgress), (False, PlainProgress)])
def test_the_console_decides(terminal, kind):
    assert type(progress_for(console(terminal=terminal)[0])) is kind


def test_summaries_average_clients_over_those_that_have_a_metric():
    latest = {("a", "test"): {"accuracy": 10.0}, ("b", "test"): {"accuracy": 20.0, "top5": 40.0}}
    assert summaries(latest) == {"mean of 2 clients test": "accuracy 15.00, top5 40.00 (of 1)"}
    assert summaries({}) == {}


def test_means_say_of_how_many_clients_they_are():
    found = {"a": {"accuracy": 10.0}, "b": {"accuracy": 30.0}, "c": {"r1_sum": 4.0, "loss": 1.0}, "d": {"loss": 2.0}}
    texts = summaries({(client, "test"): metrics for client, metrics in found.items()})
    assert texts == {"mean of 4 clients test": "accuracy 20.00 (of 2), r1_sum 4.00 (of 1), loss 1.50 (of 2)"}


def test_a_round_that_asks_no_client_says_so():
    target, stream = console(terminal=False)
    progress = PlainProgress(target)
    progress.handle(RunStarted("run", 1, 5))
    progress.handle(RoundStarted(1, []))
    progress.handle(RoundComplete(1, 2.0))
    assert "no client is asked" in stream.getvalue()
    assert "5/5" not in stream.getvalue()
