"""Replies in real time: whatever order they come in, a simulation repeats it to the same bits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

import pytest

import polyfed
from misbehaving import contents, cut_short
from polyfed.core.errors import ConfigError
from polyfed.engines.engine import Hosting
from polyfed.engines.local import InProcess, LocalEngine
from polyfed.federation.cohort import Engine
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Answer, Request
from small_federations import Config, federation_for

CHANCE = random.Random()


class Erratic(InProcess):
    """Clients as of a deployment, each of which takes a while that nobody knows; one is lost now and then."""

    home_of: ClassVar[str] = "tests"

    @property
    def is_deployed(self) -> bool:
        return True

    def serve(self, hosting: Hosting, body: Callable[[Engine], Any]) -> Any:
        with COMPUTING:
            return body(ErraticEngine(hosting.here()))


class ErraticEngine(LocalEngine):
    """Asked by several threads, computes in one at a time, and never while the server does."""

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        if threading.current_thread() is threading.main_thread():
            return super().exchange(requests, deadline)
        time.sleep(CHANCE.uniform(0.0, 0.05))
        with COMPUTING:
            answers = list(super().exchange(requests, deadline))
        is_lost = CHANCE.random() < 0.1
        return iter([Answer(answers[0].client, error="the line broke")] if is_lost else answers)


COMPUTING = threading.Lock()
"""Torch's global generator is one for all threads; clients of a deployment have a process of their own."""


@pytest.fixture(autouse=True)
def clients_compute_while_the_server_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    get = Queue.get

    def waited(queue: Queue[Any], *arguments: Any, **named: Any) -> Any:
        COMPUTING.release()
        try:
            return get(queue, *arguments, **named)
        finally:
            COMPUTING.acquire()

    monkeypatch.setattr(Queue, "get", waited)


def erratic(method: str, pace: Config, rounds: int = 4) -> Config:
    config = federation_for(method)
    engine = {"name": f"{Erratic.__module__}.Erratic"}
    config["run"] |= {"rounds": rounds, "eval_every": 2, "pace": pace, "engine": engine}
    return config


def replayed(config: Config, path: Path) -> Config:
    return config | {"run": config["run"] | {"engine": "local", "pace": config["run"]["pace"] | {"replay": str(path)}}}


PACES: dict[str, Config] = {
    "async": {"name": "async"},
    "buffered": {"name": "buffered", "replies": 2, "concurrency": 3, "max_staleness": 1},
    "deadline": {"name": "deadline", "seconds": 0.05},
}


@pytest.mark.parametrize(
    ("method", "pace"),
    [("fedavg", "buffered"), *(pytest.param("creamfl", pace, marks=pytest.mark.slow) for pace in PACES)],
)
def test_what_came_when_is_replayed_to_the_same_bits(method: str, pace: str, tmp_path: Path) -> None:
    config = erratic(method, PACES[pace])
    real = polyfed.run(Experiment.parse(config), tmp_path / "real", quiet=True)
    again = replayed(config, real.folder / "pace.jsonl")
    simulated = polyfed.run(Experiment.parse(again), tmp_path / "simulated", quiet=True)
    assert contents(simulated) == contents(real)
    assert (simulated.folder / "pace.jsonl").read_bytes() == (real.folder / "pace.jsonl").read_bytes()


def test_a_killed_server_asks_again_who_was_at_work(tmp_path: Path) -> None:
    """And what then came when is replayed as if nothing had happened."""
    config = erratic("fedavg", PACES["async"])
    resumed = polyfed.resume(cut_short(config, tmp_path / "real", at=3), quiet=True)
    again = replayed(config, resumed.folder / "pace.jsonl")
    simulated = polyfed.run(Experiment.parse(again), tmp_path / "simulated", quiet=True)
    assert contents(simulated) == contents(resumed)


@pytest.mark.parametrize(
    ("engine", "pace", "message"),
    [
        ("", {"name": "async", "clients": "drawn"}, "run.pace.clients: a deployment has a real clock"),
        ("", {"name": "async", "replay": "pace.jsonl"}, "run.pace.replay: a deployment has a real clock"),
        ("local", {"name": "async", "replay": "nowhere"}, "run.pace.replay: 'nowhere' cannot be read"),
        ("local", {"name": "async", "replay": "nowhere", "clients": "drawn"}, "clients has no effect with replay"),
    ],
)
def test_refused(engine: str, pace: Config, message: str, tmp_path: Path) -> None:
    config = erratic("fedavg", pace)
    config["run"] |= {"engine": engine} if engine else {}
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
