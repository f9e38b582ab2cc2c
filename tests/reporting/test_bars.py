"""Bars on a terminal: what they say of a run at each moment."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from run_states import Now

from polyfed.reporting.progress import BarProgress
from polyfed.runs.events import (
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


class Screen:
    """Bars of a run at a time that is set by hand."""

    def __init__(self, width: int = 80) -> None:
        self.stream = io.StringIO()
        self.console = Console(file=self.stream, force_terminal=True, width=width, color_system=None)
        self.progress = BarProgress(self.console)
        self.now = Now()
        self.progress.state.clock = self.now

    def lines(self) -> dict[str, str]:
        """First word -> line, without bars and spinners."""
        picture = self.console.render_lines(self.progress.get_renderable(), pad=False)
        lines = ["".join(segment.text for segment in line).rstrip() for line in picture]
        assert all(len(line) <= self.console.width for line in lines)
        bare = [" ".join(re.sub("[━╸╺⠀-⣿]", " ", line).split()) for line in lines]
        return {line.split()[0]: line for line in bare if line}

    def begin_round(self) -> None:
        self.progress.handle(RunStarted("demo", 12, 7))
        self.progress.handle(RoundStarted(1, COHORT))
        self.progress.handle(StepStarted("fit", COHORT))


@pytest.fixture
def screen():
    made = Screen()
    yield made
    made.progress.close()


def test_preparation_is_named_with_a_bar_before_the_run_begins(screen):
    screen.progress.handle(Preparing("reading flickr8k train", 0, 0))
    screen.now.time += 3
    assert screen.lines() == {"preparing": "preparing 3 s reading flickr8k train"}
    screen.progress.handle(Preparing("caching features", 1024, 5000))
    assert screen.lines()["preparing"] == "preparing 1,024/5,000 0 s caching features"


def test_the_client_at_work_is_named_and_not_the_one_that_has_finished(screen):
    screen.begin_round()
    screen.progress.handle(ClientStarted("image-0", "fit"))
    screen.now.time += 10
    screen.progress.handle(ClientDone("image-0", "fit", 10))
    screen.progress.handle(ClientStarted("text-1", "fit"))
    screen.now.time += 4
    screen.progress.handle(Working("text-1", "task", 12, 40))
    screen.now.time += 2
    lines = screen.lines()
    assert lines["text-1"] == "text-1 12/40 2 s training"
    assert lines["clients"] == "clients 1/4 fit"


def test_what_is_read_for_a_client_is_shown_as_its_work(screen):
    screen.begin_round()
    screen.progress.handle(ClientStarted("image-0", "fit"))
    screen.progress.handle(Preparing("decoding pictures", 3, 40))
    assert screen.lines()["image-0"] == "image-0 3/40 0 s decoding pictures"


def test_there_is_an_estimate_from_the_first_client_on_and_it_counts_down(screen):
    screen.begin_round()
    screen.progress.handle(ClientStarted("image-0", "fit"))
    screen.now.time += 5
    assert "left" not in screen.lines()["rounds"]
    screen.progress.handle(Working("image-0", "task", 5, 10))  # an eighth of the round took 5 s: 40 s a round
    assert screen.lines()["rounds"] == "rounds 0/12 5 s, about 7:55 left"
    screen.now.time += 5
    assert screen.lines()["rounds"] == "rounds 0/12 10 s, about 7:50 left"


def test_the_server_s_work_in_the_first_round_counts_for_the_rounds_that_follow(screen):
    screen.begin_round()
    for client in COHORT:
        screen.progress.handle(ClientStarted(client, "fit"))
        screen.now.time += 5
        screen.progress.handle(ClientDone(client, "fit", 5))
    assert screen.lines()["rounds"] == "rounds 0/12 20 s, about 3:40 left"  # 11 rounds of 20 s
    screen.now.time += 10
    assert screen.lines()["rounds"] == "rounds 0/12 30 s, about 5:30 left"


def test_the_bar_of_clients_moves_within_a_long_step(screen):
    screen.begin_round()
    screen.progress.handle(ClientStarted("image-0", "fit"))
    shares = []
    for done in range(0, 40, 10):
        screen.progress.handle(Working("image-0", "task", done, 40))
        shares.append(screen.progress.state.step_share)
    assert shares == [0, 0.25, 0.5, 0.75]


def test_the_server_is_named_with_its_step_once_all_have_answered(screen):
    screen.begin_round()
    for client in COHORT:
        screen.progress.handle(ClientStarted(client, "fit"))
        screen.progress.handle(ClientDone(client, "fit", 1))
    assert screen.lines()["server"] == "server 0 s at work"
    screen.progress.handle(Working("server", "distil", 3, 12))
    screen.now.time += 20
    assert screen.lines()["server"] == "server 3/12 20 s distilling"
    assert screen.lines()["clients"] == "clients 4/4 fit"


def test_several_at_work_are_counted_and_the_first_named(screen):
    screen.begin_round()
    for client in COHORT[:3]:
        screen.progress.handle(ClientStarted(client, "fit"))
    screen.now.time += 7
    assert screen.lines()["3"] == "3 clients 7 s fit: image-0, text-1 and 1 more"


def test_the_result_takes_the_place_of_the_bars():
    screen = Screen()
    screen.begin_round()
    screen.progress.handle(Incident(1, "text-1", "client_excluded", "loss [nan]"))
    screen.progress.handle(Measured(1, "server", "test", {"r1_sum": 30.0}))
    screen.progress.handle(Measured(1, "server", "train", {"distillation": 7.0}))
    screen.progress.refresh()
    screen.progress.handle(RoundComplete(1, 1.0))
    screen.progress.handle(RunComplete(Path("the result")))
    screen.progress.close()
    text = screen.stream.getvalue()
    for part in ("demo: 12 rounds, 7 clients", "round 1: client excluded: text-1: loss [nan]", "r1_sum 30.00"):
        assert part in text
    assert "distillation" not in text
    assert text.rstrip().endswith("the result")
    assert "\x1b[2K" in text[text.rindex("r1_sum") :]  # the bars are wiped


def test_a_terminal_of_any_width_can_show_them():
    for width in (20, 40, 60, 120):
        screen = Screen(width)
        screen.begin_round()
        screen.progress.handle(ClientStarted("paired-1", "fit"))
        screen.progress.handle(Working("paired-1", "task", 1, 1000))
        assert len(screen.lines()) == 3
        screen.progress.close()
