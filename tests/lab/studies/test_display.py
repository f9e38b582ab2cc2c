"""What a study shows while it runs."""

from __future__ import annotations

import io

from rich.console import Console

from polyfed.lab.studies.display import StudyDisplay
from polyfed.lab.studies.runner import Progress


def shown(*seen: tuple[float, Progress]) -> list[str]:
    """Lines without a terminal, of progress at some seconds."""
    stream, times = io.StringIO(), [0.0]
    with StudyDisplay(Console(file=stream, width=200), now=lambda: times[0]) as display:
        for when, progress in seen:
            times[0] = when
            display(progress)
    return stream.getvalue().splitlines()


def progress(done: int = 0, activity: str = "") -> Progress:
    return Progress(done, 0, 4 - done, {"creamfl, seed 0": activity}, None)


def test_a_line_whenever_a_cell_is_done() -> None:
    assert shown((0, progress()), (1, progress()), (2, progress(1)), (50, progress(1))) == [
        "0/4 | creamfl, seed 0 | 0.00 s so far",
        "1/4 | creamfl, seed 0 | 2.00 s so far",
        "1/4 | creamfl, seed 0 | 50 s so far",
    ]


def test_what_goes_on_is_told_every_ten_seconds() -> None:
    texts = [f"encoding cifar100: {number},000 of 24,000" for number in range(1, 6)]
    seen = [(4.0 * number, progress(0, text)) for number, text in enumerate(texts)]
    assert shown(*seen, (26, progress(0, texts[-1]))) == [
        f"0/4 | creamfl, seed 0 ({texts[at]}) | {seconds} so far"
        for at, seconds in ((0, "0.00 s"), (3, "12 s"), (4, "26 s"))
    ]
