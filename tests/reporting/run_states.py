"""States of a run, and screens that show them."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from polyfed.reporting.progress import RunState, run_picture
from polyfed.runs.events import (
    ClientDone,
    ClientStarted,
    Incident,
    Measured,
    RoundComplete,
    RoundStarted,
    RunStarted,
    StepStarted,
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


def play(state, rounds: int, cohort: list[str], *, first: int = 1) -> None:
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
    play(state, 4, cohort)
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
    """What is shown of a state, on a stream that takes ASCII alone if wanted."""
    stream = io.TextIOWrapper(io.BytesIO(), "ascii" if ascii_only else "utf-8", errors="strict")
    console = Console(file=stream, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        console.print(run_picture(state))
    text = captured.get()
    stream.write(text)
    stream.flush()
    assert all(console.measure(Text(line)).maximum <= width for line in text.splitlines())
    return text
