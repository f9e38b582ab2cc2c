"""A picture of a run while it goes on, for a terminal: rounds, metrics, clients, traffic, time and incidents."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from polyfed.reporting.run_state import RunState, incident_line
from polyfed.reporting.tables import duration, format_number, mib

_MOST_METRICS, _MOST_INCIDENTS = 8, 4


def run_picture(state: RunState) -> Group:
    """The state as it is now; what others named is text without markup."""
    return Group(*_parts(state))


def _parts(state: RunState) -> Iterator[RenderableType]:
    yield _line(f"{state.name or 'polyfed'}: {_moment(state)}", "bold")
    if state.rounds:
        yield Padding(ProgressBar(state.rounds, state.round - state.running), 0)
    if state.running:
        yield _line(state.step_in_words)
    if state.work_in_words:
        yield _line(state.work_in_words, "yellow")
    if state.sent:
        up, down = map(mib, state.bytes)
        last = max(state.sent)
        last_up, last_down = map(mib, state.sent[last])
        yield _line(
            f"{up} MiB up, {down} MiB down (last round {last_up}, {last_down}); {duration(state.seconds[last])} a round"
        )
    figures = (Column(name, justify="right", overflow="crop") for name in ("value", "change"))
    metrics = Table(Column("last", overflow="crop"), *figures, box=None, pad_edge=False)
    for names, value, change in list(state.latest())[:_MOST_METRICS]:
        metrics.add_row(
            _line(" ".join(names), "cyan"), format_number(value), "" if change != change else f"{change:+.2f}"
        )
    if metrics.row_count:
        yield metrics
    for incident in list(state.incidents)[-_MOST_INCIDENTS:]:
        yield _line(incident_line(incident), "yellow")


def _moment(state: RunState) -> str:
    if state.finished or not state.rounds:
        return "finished" if state.finished else "not begun"
    left = "" if state.left is None else f", about {duration(state.left)} left"
    return f"round {state.round} of {state.rounds}, {duration(state.elapsed)} elapsed{left}"


def _line(text: str, style: str = "") -> Text:
    # neither an ellipsis nor a picture of a control character is ASCII, which may be all that a terminal takes
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return Text(" ".join(shown.split()), style=style, no_wrap=True, overflow="crop")
