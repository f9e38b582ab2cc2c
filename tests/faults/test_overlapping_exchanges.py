"""Exchanges with several clients at one time, as in rounds without waiting: on one node, about one client."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_grid import FakeMessage

from polyfed.deploy.engines import flower_grid
from polyfed.deploy.engines.flower_grid import GridExchange, NodeDirectory, Sending, Sites
from polyfed.deploy.engines.flower_records import to_records
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload


class SlowNode:
    """A grid of one node that serves its messages one after the other, each for 8 of these seconds."""

    def __init__(self) -> None:
        self.now, self.pushed = 0.0, list[FakeMessage]()

    def get_node_ids(self) -> list[int]:
        return [1]

    def push_messages(self, messages: list[FakeMessage]) -> list[str]:
        self.pushed += messages
        return [str(len(self.pushed) - len(messages) + k) for k in range(1, len(messages) + 1)]

    def pull_messages(self, names: list[str]) -> list[FakeMessage]:
        replies = [FakeMessage(to_records({"error": "served"}, []), 0, "") for _ in names]
        for name, reply in zip(names, replies, strict=True):
            reply.metadata.reply_to_message_id = name
        return [reply for reply in replies if self.now >= 8 * int(reply.metadata.reply_to_message_id)]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, grid_messages: None) -> SlowNode:
    grid = SlowNode()
    monkeypatch.setattr(flower_grid, "time", SimpleNamespace(monotonic=lambda: grid.now, sleep=grid.sleep))
    return grid


def directory(grid: Any) -> NodeDirectory:
    sending = Sending(poll=0.5, absence=0.0, is_deployed=True)
    return NodeDirectory(grid, Sites(grid), "{}", sending, node_of={"a": 1, "b": 1})


def test_a_client_has_its_deadline_from_when_its_node_is_done_with_others(slow: SlowNode) -> None:
    nodes, stopped = directory(slow), threading.Event()
    requests = [Request(client, "fit", 1, 0, None, Payload({})) for client in ("a", "b")]
    exchanges = [GridExchange(nodes, [one], 10.0, Limits(), stopped) for one in requests]
    answers = [carried.answer(one.client) for carried, one in zip(exchanges, requests, strict=True)]
    assert [str(answer.failure) for answer in answers] == ["served", "served"]
    GridExchange(nodes, requests[:1], 10.0, Limits(), stopped)  # finished messages no longer count
    assert [message.metadata.ttl for message in slow.pushed] == [70.0, 80.0, 70.0]


def test_two_exchanges_may_miss_a_client_at_once(slow: SlowNode, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, seen = directory(slow), list[int | None]()

    def online() -> list[int]:
        if not seen:
            seen.append(None)
            seen.append(nodes.node("a"))  # another exchange looks for it at this moment
        return [1]

    monkeypatch.setattr(nodes.sites, "online", online)
    assert nodes.node("a") == 1
    assert seen == [None, 1]
