"""The server half of the flower engine: the directory of clients and nodes, and exchanges over Flower's grid.

It uses only stable calls of ``Grid``: ``get_node_ids``, ``push_messages`` and ``pull_messages``. Replies are pulled one
by one, and each is released as soon as its answers are taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

from flwr.app import Message

from polyfed.core.errors import ExchangeError, PayloadError
from polyfed.core.untrusted import plain
from polyfed.deploy.engines.flower_pull import DESCRIPTION_BYTES, Refusal, largest_message, pulled
from polyfed.deploy.engines.flower_records import SharedRecords, from_records, to_records
from polyfed.deploy.engines.flower_sites import Sites
from polyfed.federation.client import ClientInfo
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Cause, Envelope, Request, answer_of, envelope_requests

_log = logging.getLogger(__name__)
_DESCRIBING = 300.0  # seconds that a node may take to describe itself
_AHEAD = 2  # messages queued at each node before the reply to the first is taken


@dataclass(frozen=True)
class Sending:
    """Settings of the engine for exchanges.

    Attributes:
        poll: Seconds between checks for replies.
        absence: Seconds that a node may be away.
        retries: Times that a message is sent again when a node or process died.
        message_bytes: Largest size up to which clients of a node share a message.
        is_deployed: True if messages leave this machine, and need checksums.
    """

    poll: float
    absence: float
    retries: int = 2
    message_bytes: int = 1 << 26
    is_deployed: bool = False


@dataclass
class NodeDirectory:
    """Maps clients to nodes, which describe themselves, and may come, go and return.

    Attributes:
        grid: Flower's grid.
        sites: Identities of its nodes.
        spec: The run's spec, JSON.
        sending: Settings of the engine.
        waiting: Bundles of all current exchanges that nodes have not answered.
    """

    grid: Any
    sites: Sites
    spec: str
    sending: Sending
    node_of: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    waiting: set[_Bundle] = field(default_factory=set)
    _described: dict[str, list[ClientInfo]] = field(default_factory=dict)
    _asked: set[int] = field(default_factory=set)
    _missed: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def gather(self, sites: Sequence[str], seconds: float) -> tuple[ClientInfo, ...]:
        """Wait for all sites; returns their clients in the order of ``sites``.

        Raises:
            ExchangeError: a site did not join in time, or cannot take part.
        """

        def absent() -> list[str]:  # sites without a description or an error
            return [site for site in sites if site not in self._described and site not in self.problems]

        self._wait(lambda: not absent(), seconds)
        problems = [f"{site}: {self.problems[site]}" for site in sites if site in self.problems]
        problems += [f"{site}: did not join within {seconds:g} s" for site in absent()]
        if problems:
            raise ExchangeError(f"not all sites can take part: {'; '.join(problems)}")
        return tuple(info for site in sites for info in self._described[site])

    def find(self, clients: Sequence[str], seconds: float) -> list[str]:
        """Wait until every client is on some node; returns those that are not."""
        self._wait(lambda: bool(self.problems) or all(client in self.node_of for client in clients), seconds)
        return [client for client in clients if client not in self.node_of]

    def require(self, clients: Sequence[str], seconds: float) -> None:
        """Wait until every client is on some node.

        Raises:
            ExchangeError: a client is not, in time, or its node cannot take part.
        """
        missing = self.find(clients, seconds)
        if missing:
            reason = "; ".join(self.problems.values()) or f"not there within {seconds:g} s"
            raise ExchangeError(f"no node hosts client '{missing[0]}' ({reason})")

    def node(self, client: str) -> int | None:
        """The node of a client, or None if it has been missed for more than ``absence`` seconds."""
        end = self._missed.setdefault(client, time.monotonic()) + self.sending.absence
        self._wait(lambda: self.node_of.get(client) in self.sites.online(), end - time.monotonic())
        node = self.node_of.get(client)
        if node not in self.sites.online():
            return None
        self._missed.pop(client, None)  # another exchange may have found it first
        return node

    def _wait(self, met: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not met():
            with self._lock:  # exchanges with several clients may go on at one time
                self._asked.intersection_update(self.sites.online())  # a node that was away may have been repaired
                if unknown := [node for node in self.sites.online() if node not in self._asked]:
                    self._describe(unknown, min(max(end - time.monotonic(), 1.0), _DESCRIBING))
            if met() or time.monotonic() > end:  # a node that never describes itself must not be asked forever
                return
            time.sleep(self.sending.poll)

    def _describe(self, nodes: Sequence[int], seconds: float) -> None:
        self._asked.update(nodes)
        # Flower draws node ids anew at each start, and only nodes have the list of their clients
        content = to_records({"spec": self.spec}, [])
        questions = [Message(content, node, "query.describe", group_id="describe") for node in nodes]
        sent = {name: node for name, node in zip(push(self.grid, questions), nodes, strict=True) if name}
        end = time.monotonic() + seconds
        while sent and time.monotonic() < end:
            for name, message in pulled(self.grid, list(sent), DESCRIPTION_BYTES):
                self._enter(sent.pop(name), message)
            if sent:
                time.sleep(self.sending.poll)
        self._asked.difference_update(sent.values())  # asked again when next needed

    def _enter(self, node: int, message: Any) -> None:
        if message.has_error():
            if isinstance(message, Refusal) and message.final:
                self.problems[self.sites.name(node)] = message.reason
            else:
                self._asked.discard(node)
            _log.warning("node %d did not describe itself: %s", node, message.error.reason)
            return
        try:
            fields, _ = from_records(message.content, DESCRIPTION_BYTES)
            site = self.sites.speaker(node, fields.get("site"))
            if "error" in fields:
                self.problems[site] = plain(shorten(str(fields["error"]), 1000))
                return
            infos = [ClientInfo.from_json(entry) for entry in fields["clients"]]
            self.sites.admit(node, infos)
        except (PayloadError, KeyError, TypeError) as error:
            name, reason = self.sites.name(node), f"its node described itself wrongly: {error}"
            _log.warning("%s: %s", name, reason)
            self.problems[name] = reason
            return
        self.problems.pop(site, None)
        for info in self._described.get(site, ()):  # it may have fewer clients than before
            self.node_of.pop(info.id, None)
        self._described[site] = infos
        self.node_of |= {info.id: node for info in infos}


def push(grid: Any, messages: Sequence[Any]) -> list[str]:
    """Push messages together, so that shared content is uploaded once; returns their ids, empty if refused."""
    ids = list(grid.push_messages(messages))
    return [str(message_id or "") for message_id in ids] + [""] * (len(messages) - len(ids))


@dataclass(eq=False)
class _Bundle:
    """Requests to clients of one node that travel as one message; ``queued`` clients are served until it is done."""

    requests: list[Request] = field(default_factory=list)
    envelopes: list[Envelope] = field(default_factory=list)
    message: str = ""
    node: int | None = None
    queued: int = 0
    pushed: float = 0.0
    sent: int = 0

    @property
    def first(self) -> str:
        return self.requests[0].client


class GridExchange:
    """One exchange: bundles of requests by node, sent a few ahead, and their answers.

    Args:
        directory: Directory of clients and nodes.
        requests: Requests to carry.
        deadline: Seconds per client, or None; as a node serves one client after the other, a message has the time of
            all its clients and of those in messages sent to the node before.
        limits: Limits on received messages.
        stopped: Event that ends the run.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        requests: Sequence[Request],
        deadline: float | None,
        limits: Limits,
        stopped: threading.Event,
    ) -> None:
        self._directory, self._deadline, self._settings = directory, deadline, directory.sending
        self._limits, self._stopped = limits, stopped
        envelopes, self._frames = envelope_requests(requests, checksums=self._settings.is_deployed)
        self._records = SharedRecords()
        self._answers: dict[str, Answer] = {}
        self._queues: dict[int | None, deque[_Bundle]] = {}
        self._bundle_of: dict[str, _Bundle] = {}
        self._online = set(directory.sites.online())
        for bundle in self._bundles(requests, envelopes):
            self._queues.setdefault(directory.node_of.get(bundle.first), deque()).append(bundle)
            self._bundle_of |= dict.fromkeys((request.client for request in bundle.requests), bundle)
        self._top_up(*self._queues)

    def answer(self, client: str) -> Answer:
        """A client's answer, as soon as it has arrived or cannot come any more."""
        if client not in self._answers:
            bundle = self._bundle_of[client]
            node = next(key for key, queue in self._queues.items() if bundle in queue)
            self._top_up(node)
            for answer in self._received(bundle):
                self._answers[answer.client] = answer
            self._queues[node].remove(bundle)
            self._directory.waiting.discard(bundle)
            self._top_up(node)
        return self._answers.pop(client)

    # ---- sending

    def _bundles(self, requests: Sequence[Request], envelopes: Sequence[Envelope]) -> list[_Bundle]:
        bundles: list[_Bundle] = []
        latest: dict[int | None, _Bundle] = {}
        for request, envelope in zip(requests, envelopes, strict=True):
            node = self._directory.node_of.get(request.client)
            together = [envelope, *(latest[node].envelopes if node in latest else ())]
            # replies count as large as requests, so that the limit of a message holds for its reply too
            size = sum(raw.nbytes for one in together for place in one.places for raw in self._frames[place].buffers)
            if node not in latest or size > self._settings.message_bytes:
                latest[node] = _Bundle()
                bundles.append(latest[node])
            latest[node].requests.append(request)
            latest[node].envelopes.append(envelope)
        return bundles

    def _top_up(self, *nodes: int | None) -> None:
        """Keep a few messages queued at each node; a refused one is offered again when its answer is needed."""
        ready = [
            (bundle, node)
            for node in nodes
            if node is not None and node in self._online
            for bundle in list(self._queues[node])[:_AHEAD]
            if not bundle.message
        ]
        if ready:
            self._send(ready)

    def _send(self, ready: Sequence[tuple[_Bundle, int]]) -> None:
        for bundle, node in ready:
            bundle.node = node
            self._directory.waiting.add(bundle)  # before the count: another thread may count at this moment
            bundle.queued = sum(len(one.requests) for one in list(self._directory.waiting) if one.node == node)
        messages = [self._message(bundle, node) for bundle, node in ready]
        for (bundle, _), name in zip(ready, push(self._directory.grid, messages), strict=True):
            bundle.message = name
            bundle.pushed = time.monotonic()
            bundle.sent += bool(name)
            if not name:
                self._directory.waiting.discard(bundle)

    def _message(self, bundle: _Bundle, node: int) -> Any:
        own = sorted({place for envelope in bundle.envelopes for place in envelope.places})
        entries = [
            {"client": request.client, "text": envelope.text, "places": [own.index(place) for place in envelope.places]}
            for request, envelope in zip(bundle.requests, bundle.envelopes, strict=True)
        ]
        fields = {"spec": self._directory.spec, "checked": self._settings.is_deployed, "requests": entries}
        content = to_records(fields, [self._frames[place] for place in own], self._records)
        ttl = None if self._deadline is None else self._patience(bundle) + 60.0
        return Message(content, node, "train.step", group_id=str(bundle.requests[0].round), ttl=ttl)

    # ---- receiving

    def _received(self, bundle: _Bundle) -> list[Answer]:
        """Answers of all clients of a bundle; a message that was lost with its node or process is sent again."""
        while True:
            if not bundle.message and (problem := self._resent(bundle)):
                return _failed(bundle, Cause.LOST, problem)
            message = self._pull(bundle)
            if message is None:
                return [Answer.late(request.client, self._deadline) for request in bundle.requests]
            if not message.has_error():
                return self._opened(bundle, message)
            # errors of the SuperLink itself carry its own node id: the answered message identifies the node
            reason = shorten(str(message.error.reason), 200)
            if isinstance(message, Refusal) and message.final:
                return _failed(bundle, Cause.INVALID, reason, message.bytes)
            _log.warning("client %s: Flower reports %s", bundle.first, reason)
            bundle.message = ""
            if bundle.sent > self._settings.retries:
                times = f"{bundle.sent} times; run.engine.retries is {self._settings.retries}"
                return _failed(bundle, Cause.LOST, f"its node or process failed ({times}): {reason}")

    def _resent(self, bundle: _Bundle) -> str:
        """Send the message to the present node of its clients; returns the obstacle, if there is one."""
        node = self._directory.node(bundle.first)
        if node is None:
            refusals = "".join(f"; {site} cannot take part: {why}" for site, why in self._directory.problems.items())
            return f"its node is away for more than {self._settings.absence:g} s{refusals}"
        self._send([(bundle, node)])
        return "" if bundle.message else f"Flower refused a message to node {node}"

    def _pull(self, bundle: _Bundle) -> Any | None:
        end = None if self._deadline is None else bundle.pushed + self._patience(bundle)
        while True:
            # pulled one by one: ``Grid.send_and_receive`` sleeps for seconds, and holds all replies in memory
            most = largest_message(self._limits, [request.reply_size for request in bundle.requests])
            for _, message in pulled(self._directory.grid, [bundle.message], most):
                return message
            if self._stopped.is_set():
                raise ExchangeError("the run was stopped")
            if end is not None and time.monotonic() > end:
                return None
            time.sleep(self._settings.poll)

    def _patience(self, bundle: _Bundle) -> float:
        assert self._deadline is not None
        return self._deadline * bundle.queued

    def _opened(self, bundle: _Bundle, message: Any) -> list[Answer]:
        try:
            fields, frames = from_records(message.content, self._limits.text_bytes * len(bundle.requests))
            if "error" in fields:
                return _failed(bundle, Cause.INVALID, str(fields["error"]), _bytes_of(message.content))
            entries = {str(entry["client"]): entry for entry in fields["answers"]}
            answers, used = [], set[int]()
            for request in bundle.requests:
                client = request.client
                if (entry := entries.get(client)) is None:
                    answers.append(Answer.failed(client, Cause.INVALID, "its node did not answer for it"))
                else:
                    first, last = map(int, entry["parts"])
                    used.update(range(len(frames))[first:last])
                    answers.append(answer_of(request, str(entry["text"]), frames[first:last], self._limits))
            if unused := {*range(len(frames))} - used:
                raise PayloadError(f"damaged message: no answer refers to frame {min(unused)} of its {len(frames)}")
            return answers
        except PayloadError as error:
            reason = str(error)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = f"damaged message: {type(error).__name__}: {error}"
        return _failed(bundle, Cause.INVALID, reason, _bytes_of(message.content))


def _failed(bundle: _Bundle, cause: Cause, text: str, came: int = 0) -> list[Answer]:
    """Failures of a bundle's clients; the received bytes count once."""
    answers = [Answer.failed(request.client, cause, text) for request in bundle.requests]
    return [replace(answers[0], refused_bytes=came), *answers[1:]]


def _bytes_of(content: Any) -> int:
    texts = (value for record in content.config_records.values() for value in record.values() if isinstance(value, str))
    arrays = (array.data for record in content.array_records.values() for array in record.values())
    return sum(map(len, texts)) + sum(map(len, arrays))
