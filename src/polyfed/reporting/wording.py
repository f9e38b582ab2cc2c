"""What goes on in a run, in words: who is at work on what, for how long, and how far."""

from __future__ import annotations

from dataclasses import dataclass

from polyfed.reporting.run_state import RunState
from polyfed.reporting.tables import duration

# purposes of random streams, which methods name; others are shown as they are
_WORDS = {
    "task": "training",
    "distil": "distilling",
    "contrast": "contrasting",
    "align": "aligning",
    "digest": "digesting",
    "study": "studying",
    "first-public": "training on public data",
    "first-private": "training",
}
_MOST_NAMES = 2
PREPARING = "preparing"


@dataclass(frozen=True)
class Activity:
    """One line of a display.

    Attributes:
        who: the participant at work, or what they are together.
        words: what it does and since when.
        count: parts done of parts there are, where they are known.
        share: how much of it is done, or None where nobody knows.
    """

    who: str
    words: str
    count: str = ""
    share: float | None = None


def doing(state: RunState) -> Activity | None:
    """What goes on at the moment, or None if nobody told."""
    at_work, work = state.at_work, state.work
    if len(at_work) > 1:
        names = ", ".join(list(at_work)[:_MOST_NAMES])
        more = f" and {len(at_work) - _MOST_NAMES} more" if len(at_work) > _MOST_NAMES else ""
        longest = max(state.working_for(client) for client in at_work.values())
        return Activity(f"{len(at_work)} clients", f"{ticking(longest)}  {state.step}: {names}{more}")
    if work is None:
        return None
    known = f"{work.done:,}/{work.total:,}" if work.total else ""
    words = f"{ticking(max(0.0, state.clock() - work.since))}  {_WORDS.get(work.what, work.what) or 'at work'}"
    who = work.participant or next(iter(at_work), PREPARING)  # what a client at work needs is read for it
    return Activity(who, words, known, work.share if work.total else None)


def doing_in_a_line(state: RunState, *participants: str) -> str:
    """What goes on if one of ``participants`` does it, as one line; else empty."""
    activity = doing(state)
    if activity is None or activity.who not in participants:
        return ""
    return "  ".join(filter(None, [activity.who, activity.count, activity.words]))


def ticking(seconds: float) -> str:
    """A duration that grows while one looks: whole seconds."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)
