"""Replies in real time: whatever order they come in, a simulation repeats it to the same bits."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import polyfed
from masked_runs import federation
from misbehaving import contents, cut_short
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.engines.engine import Hosting
from polyfed.engines.local import InProcess, LocalEngine
from polyfed.federation import real_time
from polyfed.federation.cohort import Engine
from polyfed.federation.paces import Deadline
from polyfed.federation.replayed_time import ReplayedTime
from polyfed.privacy.masking.mask_keeper import MASKING
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
        before = {*threading.enumerate()}
        try:
            with COMPUTING:
                return body(ErraticEngine(hosting.here()))
        finally:
            for client in {*threading.enumerate()} - before:  # or it would compute while the next run does
                client.join(10)


class ErraticEngine(LocalEngine):
    """Asked by several threads, computes in one at a time, and never while the server does."""

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        if threading.current_thread() is threading.main_thread():
            return super().exchange(requests, deadline)
        time.sleep(CHANCE.uniform(0.0, 0.05))
        with COMPUTING:
            answers = list(super().exchange(requests, deadline))
        if CHANCE.random() < 0.1 and requests[0].step not in MASKING:
            answers[0] = Answer(answers[0].client, error="the line broke")
        return iter(answers)


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
    # groups of four bear one loss
    config = federation(clients=8) if method == "masked" else federation_for(method)
    engine = {"name": f"{Erratic.__module__}.Erratic"}
    config["run"] |= {"rounds": rounds, "eval_every": 2, "pace": pace, "engine": engine}
    return config


def replayed(config: Config, path: Path) -> Config:
    return config | {"run": config["run"] | {"engine": "local", "pace": config["run"]["pace"] | {"replay": str(path)}}}


PACES: dict[str, Config] = {
    "async": {"name": "async"},
    "buffered": {"name": "buffered", "replies": 2, "concurrency": 3, "max_staleness": 0},
    "deadline": {"name": "deadline", "seconds": 0.05},
    "groups": {"name": "buffered", "replies": 4, "max_staleness": 1},
}


@pytest.mark.parametrize(
    ("method", "pace"),
    [
        ("fedavg", "buffered"),
        ("masked", "groups"),
        *(pytest.param("creamfl", pace, marks=pytest.mark.slow) for pace in ("async", "buffered", "deadline")),
    ],
)
def test_what_came_when_is_replayed_to_the_same_bits(method: str, pace: str, tmp_path: Path) -> None:
    config = erratic(method, PACES[pace])
    real = polyfed.run(Experiment.parse(config), tmp_path / "real", quiet=True)
    again = replayed(config, real.folder / "pace.jsonl")
    simulated = polyfed.run(Experiment.parse(again), tmp_path / "simulated", quiet=True)
    assert contents(simulated) == contents(real)
    assert (simulated.folder / "pace.jsonl").read_bytes() == (real.folder / "pace.jsonl").read_bytes()
    assert_counted(real)


def assert_counted(run: polyfed.Run) -> None:
    """What crossed is in the ledger, used or not; who was at work after a round was not measured then."""
    ended = [event for event in run.records.paced if event.event not in ("opened", "started")]
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    crossed = [(line["round"], line["client"]) for line in ledger if (line["step"], line["direction"]) == ("fit", "up")]
    assert {(event.round, event.client) for event in ended if event.error is None} == {*crossed}
    for measured in run.records.measurements:
        past = [event for event in run.records.paced if event.round <= measured.round]
        latest = {event.client: event.event for event in past}
        assert measured.round == 0 or latest.get(measured.participant) != "started"


def test_a_round_is_opened_once_the_server_has_done_its_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a round of so many seconds lasts from then; a replay has the same times."""
    clock = [100.0]
    monkeypatch.setattr(real_time, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    timeline = real_time.RealTime({}, send=lambda request: Answer(request.client))
    timeline.opens(1)
    clock[0] += 5
    assert Deadline(seconds=3).limit(timeline.opens(2)) == 8
    again = ReplayedTime.of({}, timeline.events)
    assert [again.opens(number) for number in (1, 2)] == [event.seconds for event in timeline.events]


def test_an_engine_that_fails_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no answer is no client's fault."""

    def exchange(engine: ErraticEngine, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        if threading.current_thread() is threading.main_thread():
            return LocalEngine.exchange(engine, requests, deadline)
        raise ExchangeError("the grid is down")

    monkeypatch.setattr(ErraticEngine, "exchange", exchange)
    with pytest.raises(ExchangeError, match="the grid is down"):
        polyfed.run(Experiment.parse(erratic("fedavg", PACES["async"])), tmp_path / "run", quiet=True)


@pytest.mark.slow
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
