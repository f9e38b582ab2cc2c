"""The server half of the flower engine: the directory of clients and nodes, and exchanges over Flower's grid.

It uses only stable calls of ``Grid``: ``get_node_ids``, ``push_messages`` and ``pull_messages``. Replies are pulled one
by one, and each is released as soon as its answers are taken.

In a deployment a node has the identity of the site of the key that admitted it, with which its claims must agree.
SuperLink ties every request of a node to the key that signed it, and the operator ties every key to the name of a site.
So the name of a site is that of its key, for the entire run; a node that claims another name, another site's clients,
or the seat of another node receives nothing, and is reported by name.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from flwr.app import Message

from polyfed.core.errors import ExchangeError, PayloadError, RunError
from polyfed.core.files import write_atomically
from polyfed.core.untrusted import file_json, plain
from polyfed.deploy.engines.flower_pull import DESCRIPTION_BYTES, Refusal, largest_message, pulled
from polyfed.deploy.engines.flower_records import SharedRecords, from_records, to_records
from polyfed.deploy.folders import fingerprint_of_pem
from polyfed.federation.client import ClientInfo
from polyfed.wire.limits import Limits
from polyfed.wire.messages import Answer, Cause, Envelope, Request, answer_of, envelope_requests

_log = logging.getLogger(__name__)
_DESCRIBING = 300.0  # seconds that a node may take to describe itself
_AHEAD = 2  # messages queued at each node before the reply to the first is taken

REFUSED = "site_refused"
"""Event of a node that is not what it claims to be, or not what it was."""

_FILE = "sites.json"
_UNKNOWN = "unknown node"


@dataclass
class Sites:
    """Identities of a simulation's nodes, which this process has started: their own claims.

    Attributes:
        grid: Flower's grid.
    """

    grid: Any

    def online(self) -> Sequence[int]:
        return list(self.grid.get_node_ids())

    def name(self, node: int) -> str:
        return f"node {node}"

    def speaker(self, node: int, claimed: object) -> str:
        """The site of a node that claims to be ``claimed``, or None if it cannot take part.

        Raises:
            PayloadError: the node belongs to another site.
        """
        return self.name(node) if claimed is None else str(claimed)

    def admit(self, node: int, infos: Sequence[ClientInfo]) -> None:
        """Admit the clients that a node describes as those of its site.

        Raises:
            PayloadError: they are not, or one is described twice.
        """
        ids = [info.id for info in infos]
        if (twice := next((client for client in ids if ids.count(client) > 1), None)) is not None:
            raise PayloadError(f"it describes client {_quoted(twice)} more than once")


@dataclass(frozen=True)
class _Joined:
    """A site as it joined a run: the fingerprint of its key, and its clients."""

    key: str
    clients: tuple[ClientInfo, ...]


@dataclass
class RegisteredSites(Sites):
    """The sites of a deployed run: each is one admitted key, and one node at a time.

    Attributes:
        grid: Grid of SuperLink, whose nodes have the names and keys of their admission.
        names: Sites that take part, in client order.
        refused: Receives each node that is refused: its site, ``site_refused``, and the reason.
        most: Most clients of each site; 1 for others.
        joined: Sites as they joined.
    """

    names: Sequence[str]
    refused: Callable[[str, str, str], None]
    most: Mapping[str, int] = field(default_factory=dict)
    joined: dict[str, _Joined] = field(default_factory=dict)
    _seats: dict[str, int] = field(default_factory=dict)  # site -> its node
    _keys: dict[int, tuple[str, str]] = field(default_factory=dict)  # node -> site, fingerprint
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def online(self) -> Sequence[int]:
        """The connected nodes of the run's sites, one each; all others receive no request."""
        connected = {int(node.node_id): node for node in self.grid.get_nodes()}
        self._seats = {site: node for site, node in self._seats.items() if node in connected}
        return [number for number, node in connected.items() if self._is_seated(number, node)]

    def name(self, node: int) -> str:
        return self._keys[node][0]

    def speaker(self, node: int, claimed: object) -> str:
        """The site whose key the node has."""
        site, _ = self._keys[node]
        if claimed is None or claimed == site:
            return site
        raise self._refusal(node, f"it claims to be site {_quoted(str(claimed))}; its key was admitted as '{site}'")

    def admit(self, node: int, infos: Sequence[ClientInfo]) -> None:
        """Admit a site's clients: they carry its name, and are those of its first description if it joined before."""
        site, key = self._keys[node]
        before = self.joined.get(site)
        try:
            super().admit(node, infos)
            # the operator limits the clients of a site, as each has a part in medians and averages
            if before is None and len(infos) > self.most.get(site, 1):
                what = f"it describes {len(infos)} clients, and may bring {self.most.get(site, 1)}"
                raise PayloadError(f"{what}; if it is to bring more, set run.engine.clients.{site} to {len(infos)}")
            for info in infos:
                self._require_own(site, info.id)
                if before is not None and info.id not in {known.id for known in before.clients}:
                    raise PayloadError(f"it describes client {_quoted(info.id)}, which it did not join the run with")
        except PayloadError as error:
            raise self._refusal(node, str(error)) from error
        if before is None:
            self.joined[site] = _Joined(key, tuple(infos))

    # ---- what is refused

    def _is_seated(self, number: int, node: Any) -> bool:
        site, key = str(getattr(node, "name", "")), fingerprint_of_pem(bytes(getattr(node, "public_key", b"")))
        if not site or not key:
            self._report(_UNKNOWN, "SuperLink has no name or no key for it; admit sites with: polyfed deploy admit")
            return False
        self._keys[number] = site, key
        known = self.joined.get(site)
        if site not in self.names:
            self._report(site, f"it is connected and not among run.engine.sites; it is sent nothing (key {key})")
        elif self._seats.get(site, number) != number:
            self._report(site, f"it is connected by a second node, which is sent nothing (key {key})")
        elif known is not None and known.key != key:
            self._report(site, f"its key {key} is not {known.key}, with which it joined the run (see {_FILE})")
        else:
            self._seats[site] = number
            return True
        return False

    def _require_own(self, site: str, client: str) -> None:
        owners = [name for name in self.names if client == name or client.startswith(f"{name}-")]
        owner = max(owners, key=len, default=None)  # with sites 'a' and 'a-b', client 'a-b-1' belongs to the latter
        if owner != site:
            whose = f"carries the name of site '{owner}'" if owner else f"does not carry its name, as '{site}-1' does"
            raise PayloadError(f"it describes client {_quoted(client)}, which {whose}")

    def _refusal(self, node: int, reason: str) -> PayloadError:
        site, key = self._keys[node]
        self._report(site, f"{reason} (key {key})")
        return PayloadError(reason)

    def _report(self, site: str, reason: str) -> None:
        if (site, reason) not in self._reported:
            self._reported.add((site, reason))
            self.refused(site, REFUSED, reason)

    # ---- what lasts

    def remember(self, folder: Path) -> None:
        content = {site: asdict(joined) for site, joined in self.joined.items()}
        write_atomically(folder / _FILE, json.dumps(content, indent=1).encode())

    def recall(self, folder: Path) -> tuple[ClientInfo, ...]:
        """All clients that joined at an earlier start, in client order.

        Raises:
            RunError: the file is missing or damaged.
        """
        path = folder / _FILE
        try:
            self.joined = {
                site: _Joined(str(entry["key"]), tuple(ClientInfo.from_json(info) for info in entry["clients"]))
                for site, entry in file_json(path.read_bytes()).items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PayloadError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"'{path}', the list of joined sites, cannot be read ({reason}); restore it") from error
        return tuple(info for site in self.names if site in self.joined for info in self.joined[site].clients)


def _quoted(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


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
        if missing := self.find(clients, seconds):
            reason = "; ".join(self.problems.values()) or f"not there within {seconds:g} s"
            raise ExchangeError(f"no node hosts client '{missing[0]}' ({reason})")

    def node(self, client: str) -> int | None:
        """The node of a client, or None if it has been missed for more than ``absence`` seconds."""
        end = self._missed.setdefault(client, time.monotonic()) + self.sending.absence
        self._wait(lambda: self.node_of.get(client) in self.sites.online(), end - time.monotonic())
        if (node := self.node_of.get(client)) not in self.sites.online():
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
        there = [node for node in nodes if node is not None and node in self._online]
        ready = [(one, node) for node in there for one in list(self._queues[node])[:_AHEAD] if not one.message]
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
            if (message := self._pull(bundle)) is None:
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
        if (node := self._directory.node(bundle.first)) is None:
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
