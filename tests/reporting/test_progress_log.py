from __future__ import annotations

import inspect
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from polyfed.core.errors import RunError
from polyfed.reporting.progress_log import CALLS, Both, LoggedProgress, Relay, follow
from polyfed.runs.progress import Progress


class Heard(Relay):
    """Remembers what it is told, without times."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.times: list[float] = []
        self.closed = 0

    def relay(self, call: str, **arguments: Any) -> None:
        if call == "happened_at":
            self.times.append(arguments["when"])
        else:
            self.calls.append((call, arguments))

    def close(self) -> None:
        self.closed += 1


def play(progress: Progress, *, done: int = 0) -> None:
    progress.run_started("run", 2, 3, done=done)
    progress.preparing("reading x", 1, 2)
    progress.round_started(done + 1, ("a", "b"))
    progress.step_started("fit", ["a", "b"])
    progress.client_started("a", "fit")
    progress.working("a", "task", 3, 10)
    progress.client_done("a", "fit", 0.5)
    progress.event(done + 1, "b", "client_excluded", "späť\nlate")
    progress.evaluated(done + 1, "server", "test", MappingProxyType({"r1": np.float32(0.5), "loss": float("inf")}))
    progress.traffic(done + 1, 10, 20)
    progress.round_finished(done + 1, 1.25)
    progress.run_finished("the report")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "progress.jsonl"


def logged(path: Path, *, done: int = 0) -> list[bytes]:
    progress = LoggedProgress(path)
    play(progress, done=done)
    progress.close()
    return path.read_bytes().splitlines(keepends=True)


def replayed(path: Path, *looks: Callable[[], None]) -> Heard:
    """What is heard if ``looks`` happen between the looks at the file."""
    heard, left = Heard(), list(looks)

    def finished() -> bool:
        if left:
            left.pop(0)()
            return False
        return True

    follow(path, heard, poll=0, finished=finished, summary=lambda: "read again")
    return heard


def names(heard: Heard) -> list[str]:
    return [call for call, _ in heard.calls]


def test_every_call_of_progress_is_relayed_and_logged():
    known = {name for name, _ in inspect.getmembers(Progress, inspect.isfunction) if not name.startswith("_")}
    assert known - {"close"} == {name for name in vars(Relay) if name in known}
    assert known - {"close", "happened_at"} == set(CALLS)


def test_what_is_logged_is_replayed(path):
    logged(path)
    heard = replayed(path)
    assert heard.calls == [
        ("run_started", {"name": "run", "rounds": 2, "clients": 3, "done": 0}),
        ("preparing", {"what": "reading x", "done": 1, "total": 2}),
        ("round_started", {"round_number": 1, "cohort": ["a", "b"]}),
        ("step_started", {"step": "fit", "clients": ["a", "b"]}),
        ("client_started", {"client": "a", "step": "fit"}),
        ("working", {"participant": "a", "what": "task", "done": 3, "total": 10}),
        ("client_done", {"client": "a", "step": "fit", "seconds": 0.5}),
        ("event", {"round_number": 1, "participant": "b", "event": "client_excluded", "reason": "späť\nlate"}),
        (
            "evaluated",
            {"round_number": 1, "participant": "server", "kind": "test", "metrics": {"r1": 0.5, "loss": float("inf")}},
        ),
        ("traffic", {"round_number": 1, "up": 10, "down": 20}),
        ("round_finished", {"round_number": 1, "seconds": 1.25}),
        ("run_finished", {"summary": "read again"}),
    ]
    assert heard.times == sorted(heard.times)
    assert len(heard.times) == len(heard.calls)


def test_each_call_is_on_disk_at_once(path):
    progress = LoggedProgress(path)
    assert not path.exists()  # a run folder must not be touched before the run begins
    progress.run_started("run", 2, 3)
    assert json.loads(path.read_text())["call"] == "run_started"
    progress.round_started(1, ["a"])
    assert len(path.read_text().splitlines()) == 2
    progress.close()
    progress.close()


def test_the_end_is_told_from_an_interruption(path):
    lines = logged(path)
    assert follow(path, Heard(), finished=lambda: True)
    path.write_bytes(b"".join(lines[:-1]))
    assert not follow(path, Heard(), finished=lambda: True)
    path.unlink()
    assert not follow(path, Heard(), finished=lambda: True)


def test_a_file_that_grows_is_followed_byte_by_byte(path):
    whole = b"".join(logged(path))
    path.unlink()
    looks = [lambda: None, *(lambda k=k: path.write_bytes(whole[:k]) for k in range(0, len(whole) + 1, 7))]
    heard = replayed(path, *looks, lambda: path.write_bytes(whole))
    assert names(heard) == list(CALLS[:4]) + [name for name in CALLS if name not in CALLS[:4]]


def test_a_resumed_run_goes_on_after_the_last_whole_line(path):
    lines = logged(path)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:-9])
    logged(path, done=1)
    assert path.read_bytes().splitlines(keepends=True)[:5] == lines[:5]
    heard = replayed(path)
    assert names(heard) == list(CALLS[:5]) + list(CALLS)
    assert heard.calls[5] == ("run_started", {"name": "run", "rounds": 2, "clients": 3, "done": 1})


def test_a_cut_line_may_be_long(path):
    lines = logged(path)
    path.write_bytes(b"".join(lines) + b"x" * 200_000)
    logged(path, done=1)
    assert names(replayed(path)) == [*CALLS, *CALLS]


def test_a_log_that_is_one_cut_line_begins_anew(path):
    path.write_bytes(b'{"at": 1')
    assert names(replayed(path)) == []
    logged(path)
    assert names(replayed(path)) == list(CALLS)


def test_a_cut_back_log_is_replayed_from_its_beginning(path):
    lines = logged(path)
    heard = replayed(
        path,
        lambda: path.write_bytes(b"".join(lines)),
        lambda: None,
        lambda: path.write_bytes(b"".join(lines[:2])),
    )
    assert names(heard) == [*CALLS, *CALLS[:2]]


def test_a_replaced_log_is_replayed_even_if_it_is_as_long(path):
    lines = b"".join(logged(path))
    later = lines.replace(b'"at": 1', b'"at": 2')
    assert later != lines
    heard = replayed(path, lambda: None, lambda: None, lambda: path.write_bytes(later))
    assert names(heard) == [*CALLS, *CALLS]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", r"damaged line \(Expecting value.*not json"),
        ('{"call": "run_started"}', "damaged line .*'at'"),
        ('{"at": 1, "call": "__init__"}', "unknown call '__init__', valid: run_started"),
        ('{"at": 1, "call": "close"}', "unknown call 'close'"),
        ('{"at": 1, "call": "traffic", "up": 1}', "damaged line .*missing a required argument"),
        ("[1]", "damaged line"),
    ],
)
def test_a_damaged_line_is_an_error_that_shows_it(path, line, message):
    path.write_text(line + "\n")
    with pytest.raises(RunError, match=message):
        follow(path, Heard(), finished=lambda: True)


def test_a_full_disk_is_warned_of_once_and_stops_nothing(caplog):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs a device that is always full")
    progress = LoggedProgress(full)
    with caplog.at_level(logging.WARNING):
        play(progress)
        progress.close()
    assert [record.getMessage()[:36] for record in caplog.records] == ["progress is no longer written to '/d"]


def test_a_folder_that_is_not_there_is_warned_of(tmp_path, caplog):
    play(LoggedProgress(tmp_path / "nowhere" / "progress.jsonl"))
    assert len(caplog.records) == 1
    assert "nowhere" in caplog.text


def test_a_run_of_another_thread_is_followed_to_its_end(path):
    writer = threading.Thread(target=logged, args=(path,))
    heard = Heard()
    writer.start()
    assert follow(path, heard, poll=0.001, finished=lambda: not writer.is_alive())
    writer.join()
    assert names(heard) == list(CALLS)


def test_both_are_told_everything():
    first, second = Heard(), Heard()
    play(Both(first, second))
    assert first.calls == second.calls
    assert names(first) == list(CALLS)
    assert first.calls[-1] == ("run_finished", {"summary": "the report"})


def test_both_are_closed_even_if_one_fails():
    class Broken(Progress):
        def close(self) -> None:
            raise OSError("gone")

    first, last = Heard(), Heard()
    with pytest.raises(OSError, match="gone"):
        Both(first, Broken(), last).close()
    assert (first.closed, last.closed) == (1, 1)
