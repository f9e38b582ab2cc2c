"""Flower's grid without Flower: nodes are served in this process, and faults are thrown in at will."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from polyfed.deploy.engines.flower_records import Serve, answered_message

STEP, DESCRIBE = "train.step", "query.describe"
MANY = 10**6


class FakeMessage:
    """Replacement for ``flwr.app.Message``, which cannot be made outside a run of Flower's."""

    def __init__(self, content: Any, dst_node_id: int, message_type: str, *, group_id: str = "", ttl: Any = None):
        self.content = content
        self.metadata = SimpleNamespace(dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)
        self.metadata.reply_to_message_id = ""
        self.error: Any = None

    def has_error(self) -> bool:
        return self.error is not None

    @property
    def requests(self) -> list[dict[str, Any]]:
        """Requests of a message to a node."""
        facts = json.loads(self.content.config_records["polyfed"]["json"])
        return [json.loads(entry["text"]) for entry in facts.get("requests", [])]


class Lost(Exception):  # noqa: N818 - it is what became of a message
    """The process or the node of a message died over it; SuperLink reports it."""


class Silence(Exception):  # noqa: N818
    """Nothing is ever heard of a message."""


@dataclass(frozen=True)
class Delivery:
    """A message at its node.

    Attributes:
        message: The pushed message.
        grid: Its grid.
        serve: performs what is in a content, and gives the reply's.
    """

    message: FakeMessage
    grid: FakeGrid
    serve: Callable[[Any], Any]

    @property
    def node(self) -> int:
        return int(self.message.metadata.dst_node_id)

    def end_process(self) -> None:
        """The node's process loses its memory."""
        serve, _ = self.grid.nodes[self.node]
        serve.opener.end()  # type: ignore[attr-defined]


Fault = Callable[[Delivery], Any]
"""Fate of a message: the content of the reply; raises Lost or Silence."""


@dataclass
class Rule:
    """Messages that something happens to: those of a kind, with a client in a round, so many times."""

    fault: Fault
    kind: str = STEP
    client: str | None = None
    round: int | None = None
    step: str | None = None
    times: int = 1

    def applies(self, message: FakeMessage) -> bool:
        if not self.times or message.metadata.message_type != self.kind:
            return False
        wanted = {"client": self.client, "round": self.round, "step": self.step}
        wanted = {key: value for key, value in wanted.items() if value is not None}
        return not wanted or any(all(one[key] == value for key, value in wanted.items()) for one in message.requests)


@dataclass
class FakeGrid:
    """Answers as ``flwr.serverapp.Grid`` does; a message is served when its reply is first looked for.

    Attributes:
        nodes: id -> what serves its messages, and its configuration.
        rules: faults to come.
        away: nodes that are not connected -> looks at who is there until they are back.
        refused: Number of messages to refuse.
        keys: node -> name and key (PEM) that it was admitted with; by default those of its site's folder.
    """

    nodes: dict[int, tuple[Serve, Mapping[str, Any]]]
    rules: list[Rule] = field(default_factory=list)
    away: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    pushed: list[FakeMessage] = field(default_factory=list)
    keys: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    _waiting: dict[str, FakeMessage] = field(default_factory=dict)

    def get_node_ids(self) -> list[int]:
        self.away = {node: looks - 1 for node, looks in self.away.items() if looks > 0}
        return [node for node in self.nodes if node not in self.away]

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(**self._admitted(node), node_id=node) for node in self.get_node_ids()]

    def _admitted(self, node: int) -> dict[str, Any]:
        if node not in self.keys:
            folder = Path(self.nodes[node][1]["config"]).parent
            self.keys[node] = folder.name, pem(folder / "node.pub")
        name, key = self.keys[node]
        return {"name": name, "public_key": key}

    def push_messages(self, messages: Iterable[FakeMessage]) -> list[str]:
        ids = []
        for message in messages:
            if self.refused:
                self.refused -= 1
                ids.append("")
                continue
            self.pushed.append(message)
            ids.append(f"message-{len(self.pushed)}")
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Sequence[str]) -> list[FakeMessage]:
        seen = [self._reply(key) for key in list(message_ids) if key in self._waiting]
        return [reply for reply in seen if reply is not None]

    def steps(self, client: str) -> list[tuple[str, int]]:
        """Names and rounds of the requests that were pushed for a client."""
        sent = [request for message in self.pushed for request in message.requests]
        return [(request["step"], request["round"]) for request in sent if request["client"] == client]

    def _reply(self, key: str) -> FakeMessage | None:
        message = self._waiting.pop(key)
        node = message.metadata.dst_node_id
        reply = FakeMessage(None, 0, message.metadata.message_type)
        reply.metadata.reply_to_message_id = key
        try:
            if node in self.away:
                raise Lost("Node Unavailable")
            rule = next((rule for rule in self.rules if rule.applies(message)), None)
            if rule is not None:
                rule.times -= 1
            fault = rule.fault if rule is not None else served
            reply.content = fault(Delivery(message, self, lambda content: self._performed(message, content)))
        except Lost as lost:
            reply.error = SimpleNamespace(code=8, reason=str(lost))
        except Silence:
            return None
        return reply

    def _performed(self, message: FakeMessage, content: Any) -> Any:
        serve, config = self.nodes[message.metadata.dst_node_id]
        return answered_message(message.metadata.message_type.partition(".")[2], content, config, serve)


def pem(public_key: Path) -> bytes:
    """A public key as SuperLink has it."""
    return load_ssh_public_key(public_key.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


# ---- faults


def served(delivery: Delivery) -> Any:
    """None: the message arrives and so does the reply."""
    return delivery.serve(delivery.message.content)


def dies_before(delivery: Delivery) -> Any:
    """The process is killed before it has done anything; another one takes its place."""
    delivery.end_process()
    raise Lost("the ClientApp stopped responding")


def dies_after(delivery: Delivery) -> Any:
    """The process is killed when the step is done and kept, and the reply is not sent."""
    delivery.serve(delivery.message.content)
    delivery.end_process()
    raise Lost("the ClientApp stopped responding")


def is_silent(delivery: Delivery) -> Any:
    """Nothing comes back."""
    raise Silence


def goes_away(looks: int) -> Fault:
    """The node disconnects over the message, for so many looks at who is there."""

    def fault(delivery: Delivery) -> Any:
        delivery.grid.away[delivery.node] = looks
        raise Lost("Node Unavailable")

    return fault


def comes_back_as(node: int) -> Fault:
    """The node disconnects over the message, and is back under another id."""

    def fault(delivery: Delivery) -> Any:
        delivery.grid.nodes[node] = delivery.grid.nodes.pop(delivery.node)
        raise Lost("Node Unavailable")

    return fault


def damages_request(change: Callable[[Any], Any]) -> Fault:
    """The content of the message arrives changed."""
    return lambda delivery: delivery.serve(change(delivery.message.content))


def damages_reply(change: Callable[[Any], Any]) -> Fault:
    """The content of the reply arrives changed."""
    return lambda delivery: change(delivery.serve(delivery.message.content))
