"""Ray's engine over made workers with a clock of their own: who waits for whom, and which requests share a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyfed.engines import ray as engine
from polyfed.federation.client import ClientInfo
from polyfed.wire import messages
from polyfed.wire.limits import Limits
from polyfed.wire.payload import Payload, TensorBundle

LOST = (ConnectionError, KeyError)
"""Errors in place of Ray's: of a worker that died, and of one that raised."""


class Handle(SimpleNamespace):
    """A worker or a call, equal to itself alone."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(eq=False)
class Made:
    """A pool of two made workers, and the package that reaches them.

    Attributes:
        seconds: Time that a client's step takes; an exception for a worker that dies of it.
        nbytes: Bytes of a reply.
        now: Time of the clock.
        calls: Clients of each call, in order.
        ahead, most: Requests sent whose answers are not consumed, and the most that there were.
        queued: Calls to a worker that was busy.
    """

    seconds: Callable[[str], float | None]
    nbytes: int = 8
    now: float = 0.0
    calls: list[list[str]] = field(default_factory=list)
    ahead: int = 0
    most: int = 0
    queued: int = 0
    retries: int = 2
    workers: list[Any] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.ray = self
        self.exceptions = SimpleNamespace(RayError=LOST, RayActorError=LOST[0], RayTaskError=LOST[1])

    def begun(self) -> Any:
        """A worker that does its calls one after the other."""
        worker = Handle(free=0.0)
        worker.run = SimpleNamespace(remote=partial(self.remote, worker))
        return worker

    def remote(self, worker: Any, asked: Sequence[tuple[str, messages.Envelope]], *_: Any) -> Any:
        """Begin a call, or let it wait."""
        self.calls.append([client for client, _ in asked])
        taken = [self.seconds(client) for client, _ in asked]
        self.ahead += len(asked)
        self.most = max(self.most, self.ahead)
        self.queued += worker.free > self.now
        worker.free = max(worker.free, self.now) + sum(each or 0 for each in taken)
        return Handle(end=worker.free, taken=taken, clients=self.calls[-1])

    def wait(self, futures: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """Let time pass until the first call ends."""
        if futures and timeout:
            self.now = max(self.now, min(self.now + timeout, *(future.end for future in futures)))
        done = [future for future in futures if future.end <= self.now][:num_returns]
        return done, [future for future in futures if future not in done]

    def get(self, future: Any) -> list[Any]:
        """Replies of a call that has ended."""
        if None in future.taken:
            self.ahead -= len(future.clients)
            raise LOST[0](f"died of {future.clients}")
        bundle = TensorBundle({"sent": torch.zeros(self.nbytes, dtype=torch.uint8)})
        made = [messages.envelope_answer(messages.Answer(name, Payload({"sent": bundle}))) for name in future.clients]
        replies = [(text, [engine._portable(frame) for frame in frames]) for text, frames in made]
        return [(*reply, seconds, [0.0]) for reply, seconds in zip(replies, future.taken, strict=True)]

    def grow(self) -> None:
        """Nothing: all workers are there."""

    def replace(self, worker: Any) -> None:
        """A worker in place of one that died."""
        self.workers[self.workers.index(worker)] = self.begun()


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[messages.Answer]]:
    """Answers of an exchange with so many clients, and another one before, which shows how long they take."""

    def run(pool: Made, count: int, deadline: float | None = None, rounds: int = 2) -> list[messages.Answer]:
        monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: pool.now))
        infos = tuple(ClientInfo(f"c{k}", "g", ("image",), "t", 1, 1, "net") for k in range(count))
        there, answers = engine.RayEngine(infos, pool), list[messages.Answer]()  # type: ignore[arg-type]
        for number in range(rounds):
            pool.now, pool.calls, pool.most, answers = 0.0, [], 0, []
            pool.workers = [pool.begun() for _ in range(2)]
            requests = [messages.Request(info.id, "fit", number, 0, None, Payload({"n": 1})) for info in infos]
            for answer in there.exchange(requests, deadline):
                pool.ahead -= 1
                answers.append(answer)
        assert [answer.client for answer in answers] == [info.id for info in infos]
        return answers

    return run


def test_a_slow_client_holds_up_no_other(exchanged: Any) -> None:
    pool = Made(lambda client: 10.0 if client == "c0" else 1.0)
    assert all(answer.payload is not None for answer in exchanged(pool, 20))
    assert pool.now == pytest.approx(15.0, abs=0.5)  # of 29 s of work
    assert {len(call) for call in pool.calls} == {1}


def test_small_clients_share_calls_that_shrink(exchanged: Any) -> None:
    pool = Made(lambda client: 0.004)
    exchanged(pool, 1000)
    sizes = [len(call) for call in pool.calls]
    assert max(sizes) == sizes[0] == 50  # 0.2 s
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 3
    assert len(sizes) < 40
    assert pool.now == pytest.approx(2.0, abs=0.05)  # both workers end together


def test_a_second_call_waits_where_the_first_is_known_to_be_short(exchanged: Any) -> None:
    pool = Made(lambda client: 0.15)
    exchanged(pool, 20)
    assert pool.queued >= 16
    pool = Made(lambda client: 0.25)
    exchanged(pool, 20)
    assert pool.queued == 0


@pytest.mark.slow
def test_early_replies_are_bounded_in_bytes_or_two_a_worker(exchanged: Any) -> None:
    pool = Made(lambda client: 100.0 if client == "c0" else 0.01, nbytes=1 << 20)
    exchanged(pool, 200)
    assert 50 < pool.most <= 64
    assert max(map(len, pool.calls)) == 4  # MiB a call
    pool = Made(pool.seconds, nbytes=engine._HELD)
    exchanged(pool, 20)
    assert pool.most == 4
    assert len(pool.calls) == 20


def test_with_a_deadline_a_client_that_is_late_takes_no_other_along(exchanged: Any) -> None:
    pool = Made(lambda client: 50.0 if client == "c3" else 0.01)
    answers = exchanged(pool, 20, deadline=2.0)
    late = {answer.client: answer.failure.text for answer in answers if answer.failure is not None}
    assert late == {"c3": "no answer within 2 s"}
    assert {len(call) for call in pool.calls} == {1}
    assert pool.now < 2.5


def test_a_call_whose_worker_died_is_done_again_one_by_one(exchanged: Any) -> None:
    pool = Made(lambda client: None if client == "c30" else 0.01)
    lost = {answer.client: answer.failure.text for answer in exchanged(pool, 40) if answer.failure is not None}
    assert lost == {"c30": "its worker died 3 times in this step (run.engine.retries is 2)"}
    shared = next(call for call in pool.calls if "c30" in call)
    assert len(shared) > 1
    assert all([client] in pool.calls for client in shared)
    assert pool.calls.count(["c30"]) == 3


def test_replies_that_share_a_call_have_memory_of_their_own() -> None:
    """A site may use the tensors of a reply again for the next one."""
    worker, kept = engine.Worker(None, ""), torch.zeros(1)  # type: ignore[arg-type]

    def answer(request: messages.Request) -> messages.Answer:
        return messages.Answer(request.client, Payload({"sent": TensorBundle({"w": kept.add_(1)})}))

    worker.site = SimpleNamespace(limits=Limits(), answer=answer)  # type: ignore[assignment]
    requests = [messages.Request(name, "fit", 1, 0, None, Payload({"n": 1})) for name in "ab"]
    envelopes, _ = messages.envelope_requests(requests)
    done = worker.run(list(zip("ab", envelopes, strict=True)), [])
    assert [frames[0][1][0].view("float32").tolist() for _, frames, _, _ in done] == [[1.0], [2.0]]
