"""Replies in real time, in whatever order they come."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any, ClassVar

import pytest

import polyfed
from misbehaving import cut_short
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.engines.engine import Hosting
from polyfed.engines.local import InProcess, LocalEngine
from polyfed.federation.cohort import Engine
from polyfed.federation.paced_cohort import TimelineEvent
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Answer, Cause, Request
from small_federations import Config, federation_for

CHANCE = random.Random()
ONE_REPLY: Config = {"name": "buffered", "replies": 1}


class Erratic(InProcess):
    """Clients as of a deployment, each of which takes an unknown while; one is lost now and then."""

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
        if CHANCE.random() < 0.1:
            answers[0] = Answer.failed(answers[0].client, Cause.LOST, "the line broke")
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


def erratic(pace: Config, rounds: int = 4) -> Config:
    config = federation_for("fedavg")
    engine = {"name": f"{Erratic.__module__}.Erratic"}
    config["run"] |= {"rounds": rounds, "eval_every": 2, "pace": pace, "engine": engine}
    return config


@pytest.mark.parametrize(
    ("pace", "replies"), [(ONE_REPLY, 1), ({"name": "buffered", "replies": 2, "concurrency": 3, "max_staleness": 0}, 2)]
)
def test_rounds_end_once_so_many_have_replied(pace: Config, replies: int, tmp_path: Path) -> None:
    run = polyfed.run(Experiment.parse(erratic(pace)), tmp_path / "real", quiet=True)
    notes = [line.metrics for line in run.records.measurements if line.kind == "pace"]
    assert [line["replies"] for line in notes] == [replies] * 4
    assert_counted(run)


def events_of(run: polyfed.Run) -> list[TimelineEvent]:
    return [TimelineEvent(**json.loads(line)) for line in (run.folder / "pace.jsonl").read_text().splitlines()]


def assert_counted(run: polyfed.Run) -> None:
    """All that crossed is in the ledger, used or not; clients at work after a round were not measured then."""
    paced = events_of(run)
    ended = [event for event in paced if event.event != "started"]
    for dropped in (True, False):  # a stale reply is noted at once, others when the round has all that it waits for
        seconds = [event.seconds for event in ended if (event.event == "dropped") == dropped]
        assert seconds == sorted(seconds)
    ledger = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    crossed = [(line["round"], line["client"]) for line in ledger if (line["step"], line["direction"]) == ("fit", "up")]
    assert {(event.round, event.client) for event in ended if event.error is None} == {*crossed}
    for measured in run.records.measurements:
        latest = {event.client: event.event for event in paced if event.round <= measured.round}
        assert measured.round == 0 or latest.get(measured.participant) != "started"


def test_an_engine_that_fails_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the exchange does not exclude a client."""

    def exchange(engine: ErraticEngine, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        if threading.current_thread() is threading.main_thread():
            return LocalEngine.exchange(engine, requests, deadline)
        raise ExchangeError("the grid is down")

    monkeypatch.setattr(ErraticEngine, "exchange", exchange)
    with pytest.raises(ExchangeError, match="the grid is down"):
        polyfed.run(Experiment.parse(erratic(ONE_REPLY)), tmp_path / "run", quiet=True)


def test_a_killed_server_asks_again_who_was_at_work(tmp_path: Path) -> None:
    resumed = polyfed.resume(cut_short(erratic(ONE_REPLY), tmp_path / "real", at=3), quiet=True)
    assert resumed.records.rounds == 4
    assert_counted(resumed)
    asked = [(event.client, event.asked) for event in events_of(resumed) if event.event == "started"]
    assert len(asked) == len({*asked})  # what a client was asked before is not asked once more
    late = [event for event in events_of(resumed) if event.event != "started" and event.asked < 3 <= event.round]
    assert {(event.client, event.asked) for event in late} <= {*asked}


def test_virtual_times_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.pace\.clients 'drawn': a deployment has a real clock"):
        polyfed.run(Experiment.parse(erratic(ONE_REPLY | {"clients": "drawn"})), tmp_path / "run", quiet=True)
