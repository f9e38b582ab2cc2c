"""What a run shows while it goes on: lines for log files, bars on a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from run_states import Now

from polyfed.reporting.progress import BarProgress, PlainProgress, progress_for, summaries
from polyfed.runs.events import (
    Callback,
    ClientDone,
    ClientStarted,
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


@pytest.mark.parametrize(("terminal", "kind"), [(True, BarProgress), (False, PlainProgress)])
def test_the_console_decides(terminal, kind):
    assert type(progress_for(console(terminal=terminal)[0])) is kind


def test_a_callback_may_care_for_nothing():
    play(Callback())


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


def test_a_round_that_asks_no_client_says_so():
    target, stream = console(terminal=False)
    progress = PlainProgress(target)
    for event in (RunStarted("run", 1, 5), RoundStarted(1, []), RoundComplete(1, 2.0)):
        progress.handle(event)
    assert "no client is asked" in stream.getvalue()
    assert "5/5" not in stream.getvalue()


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
    assert summaries({(client, "test"): metrics for client, metrics in of_clients.items()}) == expected


# ---- bars


class Bars:
    """Bars of a run at a time that is set by hand, in its first round."""

    def __init__(self, width: int = 80, *, begun: bool = True) -> None:
        self.console, self.stream = console(terminal=True, width=width)
        self.progress = BarProgress(self.console)
        self.now = self.progress.state.clock = Now()
        if begun:
            self.handle(RunStarted("demo", 12, 7), RoundStarted(1, COHORT), StepStarted("fit", COHORT))

    def handle(self, *events) -> None:
        for event in events:
            self.progress.handle(event)

    def lines(self) -> dict[str, str]:
        """First word -> line, without bars and spinners."""
        picture = self.console.render_lines(self.progress.get_renderable(), pad=False)
        lines = ["".join(segment.text for segment in line).rstrip() for line in picture]
        assert all(len(line) <= self.console.width for line in lines)
        bare = [" ".join(re.sub("[━╸╺⠀-⣿]", " ", line).split()) for line in lines]
        return {line.split()[0]: line for line in bare if line}


@pytest.fixture
def bars():
    made = Bars()
    yield made
    made.progress.close()


def test_preparation_is_named_with_a_bar_before_the_run_begins():
    bars = Bars(begun=False)
    bars.handle(Preparing("reading flickr8k train", 0, 0))
    bars.now.time += 3
    assert bars.lines() == {"preparing": "preparing 3 s reading flickr8k train"}
    bars.handle(Preparing("caching features", 1024, 5000))
    assert bars.lines()["preparing"] == "preparing 1,024/5,000 0 s caching features"
    bars.progress.close()


def test_the_client_at_work_is_named_and_not_the_one_that_has_finished(bars):
    bars.handle(ClientStarted("image-0", "fit"), Preparing("decoding pictures", 3, 40))
    assert bars.lines()["image-0"] == "image-0 3/40 0 s decoding pictures"  # what is read for it is its work
    bars.now.time += 10
    bars.handle(ClientDone("image-0", "fit", 10), ClientStarted("text-1", "fit"))
    bars.now.time += 4
    bars.handle(Working("text-1", "task", 12, 40))
    bars.now.time += 2
    lines = bars.lines()
    assert lines["text-1"] == "text-1 12/40 2 s training"
    assert lines["clients"] == "clients 1/4 fit"


def test_there_is_an_estimate_from_the_first_client_on_and_it_counts_down(bars):
    bars.handle(ClientStarted("image-0", "fit"))
    bars.now.time += 5
    assert "left" not in bars.lines()["rounds"]
    bars.handle(Working("image-0", "task", 5, 10))  # an eighth of the round took 5 s: 40 s a round
    assert bars.lines()["rounds"] == "rounds 0/12 5 s, about 7:55 left"
    bars.now.time += 5
    assert bars.lines()["rounds"] == "rounds 0/12 10 s, about 7:50 left"


def test_the_server_s_work_in_the_first_round_is_named_and_counts_for_the_rounds_that_follow(bars):
    for client in COHORT:
        bars.handle(ClientStarted(client, "fit"))
        bars.now.time += 5
        bars.handle(ClientDone(client, "fit", 5))
    lines = bars.lines()
    assert lines["rounds"] == "rounds 0/12 20 s, about 3:40 left"  # 11 rounds of 20 s
    assert lines["server"] == "server 0 s at work"
    bars.handle(Working("server", "distil", 3, 12))
    bars.now.time += 10
    lines = bars.lines()
    assert lines["rounds"] == "rounds 0/12 30 s, about 5:30 left"
    assert lines["server"] == "server 3/12 10 s distilling"
    assert lines["clients"] == "clients 4/4 fit"


def test_the_bar_of_clients_moves_within_a_long_step(bars):
    bars.handle(ClientStarted("image-0", "fit"))
    shares = []
    for done in range(0, 40, 10):
        bars.handle(Working("image-0", "task", done, 40))
        shares.append(bars.progress.state.step_share)
    assert shares == [0, 0.25, 0.5, 0.75]


def test_several_at_work_are_counted_and_the_first_named(bars):
    bars.handle(*(ClientStarted(client, "fit") for client in COHORT[:3]))
    bars.now.time += 7
    assert bars.lines()["3"] == "3 clients 7 s fit: image-0, text-1 and 1 more"


def test_the_result_takes_the_place_of_the_bars(bars):
    bars.handle(
        Incident(1, "text-1", "client_excluded", "loss [nan]"),
        Measured(1, "server", "test", {"r1_sum": 30.0}),
        Measured(1, "server", "train", {"distillation": 7.0}),
    )
    bars.progress.refresh()
    bars.handle(RoundComplete(1, 1.0), RunComplete(Path("the result")))
    text = bars.stream.getvalue()
    for part in ("demo: 12 rounds, 7 clients", "round 1: client excluded: text-1: loss [nan]", "r1_sum 30.00"):
        assert part in text
    assert "distillation" not in text
    assert text.rstrip().endswith("the result")
    assert "\x1b[2K" in text[text.rindex("r1_sum") :]  # the bars are wiped


@pytest.mark.parametrize("width", [20, 40, 60, 120])
def test_a_terminal_of_any_width_can_show_them(width):
    bars = Bars(width)
    bars.handle(ClientStarted("paired-1", "fit"), Working("paired-1", "task", 1, 1000))
    assert len(bars.lines()) == 3
    bars.progress.close()
