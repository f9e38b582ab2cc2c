from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from polyfed.core.errors import RunError
from polyfed.runs.events import (
    LOGGED,
    Callback,
    Callbacks,
    ClientDone,
    ClientStarted,
    Event,
    EventLog,
    Incident,
    Measured,
    Preparing,
    Recorder,
    RoundComplete,
    RoundStarted,
    RunComplete,
    RunStarted,
    StepStarted,
    Working,
    follow,
)

HERE = Path("here")


class Heard(Callback):
    """Remembers events, and apart from them their times."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.times: list[float] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def happened_at(self, when: float) -> None:
        self.times.append(when)

    def close(self) -> None:
        self.closed += 1


def events(done: int = 0) -> list[Event]:
    """One of each kind."""
    return [
        RunStarted("run", 2, 3, done=done),
        Preparing("reading x", 1, 2),
        RoundStarted(done + 1, ["a", "b"]),
        StepStarted("fit", ["a", "b"]),
        ClientStarted("a", "fit"),
        Working("a", "task", 3, 10),
        ClientDone("a", "fit", 0.5),
        Incident(done + 1, "b", "client_excluded", "späť\nlate"),
        Measured(done + 1, "server", "test", MappingProxyType({"r1": np.float32(0.5), "loss": float("inf")})),
        RoundComplete(done + 1, 1.25, 10, 20),
        RunComplete(Path("/somewhere/else")),
    ]


def play(callback: Callback, *, done: int = 0) -> None:
    for event in events(done):
        callback.handle(event)


PLAYED = tuple(type(event).__name__ for event in events())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress.jsonl"


def logged(path: Path, *, done: int = 0) -> list[bytes]:
    progress = EventLog(path)
    play(progress, done=done)
    progress.close()
    return path.read_bytes().splitlines(keepends=True)


def replayed(path: Path, *looks: Callable[[], None]) -> Heard:
    """Events that arrive if ``looks`` happen between the looks at the file."""
    heard, left = Heard(), list(looks)

    def finished() -> bool:
        if left:
            left.pop(0)()
            return False
        return True

    follow(path, heard, HERE, poll=0, finished=finished)
    return heard


def names(heard: Heard) -> list[str]:
    return [type(event).__name__ for event in heard.events]


def test_every_event_is_logged():
    assert {event_class.__name__ for event_class in Event.__subclasses__()} == set(LOGGED) == set(PLAYED)


def test_what_is_logged_is_replayed(path):
    logged(path)
    heard = replayed(path)
    assert heard.events == [*events()[:-1], RunComplete(HERE)]  # as the folder is called where the run is watched
    assert heard.times == sorted(heard.times)
    assert len(heard.times) == len(heard.events)


def test_what_happens_before_the_run_begins_is_written_after_its_start(path):
    log = EventLog(path)
    log.handle(Preparing("reading x"))
    log.handle(Measured(0, "server", "train", {"budget": 1.0}))
    log.handle(StepStarted("initial", ["a"]))
    log.handle(Incident(0, "a", "client_excluded", "late"))
    assert not path.exists()  # a run folder must not be touched before the run begins
    log.handle(RunStarted("run", 2, 3))
    assert names(replayed(path)) == ["RunStarted", "Measured", "Incident"]
    log.close()


def test_each_event_is_on_disk_at_once(path):
    log = EventLog(path)
    log.handle(RunStarted("run", 2, 3))
    assert json.loads(path.read_text())["event"] == "RunStarted"
    log.handle(RoundStarted(1, ["a"]))
    assert len(path.read_text().splitlines()) == 2
    log.close()
    log.close()


def test_the_end_differs_from_an_interruption(path):
    lines = logged(path)
    assert follow(path, Heard(), HERE, finished=lambda: True)
    path.write_bytes(b"".join(lines[:-1]))
    assert not follow(path, Heard(), HERE, finished=lambda: True)
    path.unlink()
    assert not follow(path, Heard(), HERE, finished=lambda: True)


def test_a_file_that_grows_is_followed_byte_by_byte(path):
    complete = b"".join(logged(path))
    path.unlink()
    looks = [lambda: None, *(lambda k=k: path.write_bytes(complete[:k]) for k in range(0, len(complete) + 1, 7))]
    assert names(replayed(path, *looks, lambda: path.write_bytes(complete))) == list(PLAYED)


def test_a_resumed_run_goes_on_after_the_last_whole_line(path):
    lines = logged(path)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:-9])
    logged(path, done=1)
    assert path.read_bytes().splitlines(keepends=True)[:5] == lines[:5]
    heard = replayed(path)
    assert names(heard) == list(PLAYED[:5]) + list(PLAYED)
    assert heard.events[5] == RunStarted("run", 2, 3, done=1)


@pytest.mark.parametrize("cut", [b"x" * 200_000, b'{"at": 1'])
def test_a_cut_line_may_be_long_and_all_there_is(path, cut):
    lines = logged(path) if len(cut) > 100 else []
    path.write_bytes(b"".join(lines) + cut)
    assert names(replayed(path)) == list(PLAYED[: len(lines)])
    logged(path, done=1)
    assert names(replayed(path)) == [*PLAYED[: len(lines)], *PLAYED]


def test_a_cut_back_log_is_replayed_from_its_beginning(path):
    lines = logged(path)
    whole, part = b"".join(lines), b"".join(lines[:2])
    heard = replayed(path, lambda: path.write_bytes(whole), lambda: None, lambda: path.write_bytes(part))
    assert names(heard) == [*PLAYED, *PLAYED[:2]]


def test_a_replaced_log_is_replayed_even_if_it_is_as_long(path):
    lines = b"".join(logged(path))
    later = lines.replace(b'"at": 1', b'"at": 2')
    assert later != lines
    assert names(replayed(path, lambda: None, lambda: None, lambda: path.write_bytes(later))) == [*PLAYED, *PLAYED]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"damaged line \(Expecting value.*not json"),
        ('{"event": "RunStarted"}', "damaged line .*'at'"),
        ('{"at": 1, "event": "__init__"}', "unknown event '__init__', valid: Preparing"),
        ('{"at": 1, "event": "Event"}', "unknown event 'Event'"),
        ('{"at": 1, "event": "RoundComplete", "up": 1}', "damaged line .*round: Field required"),
        ("[1]", "damaged line"),
    ],
)
def test_a_damaged_line_is_an_error_that_shows_it(path, line, message):
    path.write_text(line + "\n")
    with pytest.raises(RunError, match=message):
        follow(path, Heard(), HERE, finished=lambda: True)


@pytest.mark.parametrize("place", ["/dev/full", "nowhere/progress.jsonl"])
def test_a_file_that_cannot_be_written_is_warned_of_once_and_stops_nothing(tmp_path, caplog, place):
    if place.startswith("/") and not Path(place).exists():
        pytest.skip("needs a device that is always full")
    progress = EventLog(tmp_path / place)
    play(progress)
    progress.close()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"progress is no longer written to '{tmp_path / place}'")


def test_all_callbacks_are_given_everything_and_closed_even_if_one_fails():
    class Broken(Callback):
        def close(self) -> None:
            raise OSError("gone")

    first, last = Heard(), Heard()
    every = Callbacks([first, Broken(), last])
    play(every)
    every.happened_at(7.0)
    with pytest.raises(OSError, match="gone"):
        every.close()
    for one in (first, last):
        assert (names(one), one.times, one.closed) == (list(PLAYED), [7.0], 1)


def test_records_of_a_round_are_measurements_and_what_belongs_to_the_result():
    recorder = Recorder()
    play(recorder)
    recorder.handle(Incident(1, "server", "resumed", "after round 1", is_result=False))
    assert recorder.take() == [
        {"round": 1, "participant": "b", "kind": "event", "event": "client_excluded", "reason": "späť\nlate"},
        {"round": 1, "participant": "server", "kind": "test", "metrics": {"r1": 0.5, "loss": float("inf")}},
    ]
    assert recorder.take() == []
