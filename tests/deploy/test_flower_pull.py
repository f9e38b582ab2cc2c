"""Replies pulled from a SuperLink within bounds: Flower's own objects, kept in memory in place of the SuperLink's."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from polyfed.deploy.connection import reply_to
from polyfed.deploy.engines.flower_pull import Refusal, largest_message, pulled
from polyfed.deploy.engines.flower_records import from_records, to_records
from polyfed.wire.limits import Frame, Limits, ReplySize

MOST = 1 << 22


class SuperLink:
    """Stores one reply, and counts what is pulled of it."""

    def __init__(self, content: RecordDict) -> None:
        message = make_message(Metadata(1, "m", 7, 1, "asked", "", 1e9, 0.0, "train.step"), content=content)
        self.name = message.object_id
        self.objects = {name: made.deflate() for name, made in get_all_nested_objects(message).items()}
        self.tree = get_object_tree(message)
        self.bytes = 0
        self.received: list[str] = []
        self.missing: set[str] = set()
        self._runtime_client = self
        self.node = None
        self.run = SimpleNamespace(run_id=1)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        stored = SimpleNamespace(metadata=SimpleNamespace(message_id=self.name, reply_to_message_id="asked"))
        return SimpleNamespace(messages_list=[stored], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        there = request.object_id not in self.missing
        content = self.objects[request.object_id] if there else b""
        self.bytes += len(content)
        return SimpleNamespace(object_found=there, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.received.append(request.message_object_id)

    def replace(self, kind: bytes, change: Callable[[bytes], bytes]) -> None:
        """Change the content of all objects of a kind, but not their names."""
        self.objects = {
            name: change(content) if content.startswith(kind) else content for name, content in self.objects.items()
        }


def honest(size: int = 1000) -> RecordDict:
    part = Frame('{"kind": "x"}', [memoryview(bytes(range(250)) * (size // 250)), memoryview(b"")])
    return to_records({"answers": [{"client": "a", "text": "größe"}]}, [part])


def one(link: SuperLink, most: int = MOST) -> Any:
    [(name, message)] = pulled(link, ["asked"], most)
    assert name == "asked"
    return message


def test_an_honest_reply_arrives_as_it_was_sent() -> None:
    link = SuperLink(honest(1 << 20))
    facts, [part] = from_records(one(link).content)
    assert facts == {"answers": [{"client": "a", "text": "größe"}]}
    assert [bytes(raw) for raw in part.buffers] == [bytes(range(250)) * ((1 << 20) // 250), b""]
    assert link.received == [link.name]


def test_pulling_ends_with_what_is_too_much() -> None:
    content = honest()
    content["flood"] = ArrayRecord(
        {str(k): Array("uint8", (1 << 20,), "raw", bytes([k]) * (1 << 20)) for k in range(40)}
    )
    link = SuperLink(content)
    refusal = one(link)
    assert isinstance(refusal, Refusal)
    assert refusal.final
    assert "message of more than 4,194,304 bytes" in refusal.reason
    assert link.bytes <= MOST + (1 << 20) + 1000  # the object that was too much has come, and no other
    assert link.received == [link.name]  # so that the SuperLink lets go of it


def test_a_chunk_named_many_times_is_not_unfolded() -> None:
    link = SuperLink(honest(1 << 20))

    def bomb(content: bytes) -> bytes:
        return content.replace(b"[0]", json.dumps([0] * 1000).encode())  # 1 GB

    link.replace(b"Array ", bomb)
    assert "message of more than" in one(link).reason


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (b"Array ", lambda content: content + b" " * 20_000),  # JSON that would be parsed
        (b"Array ", lambda content: content.replace(b"[0]", b"[7]")),
        (b"Array ", lambda content: content.replace(b"[0]", b"[" * 2000)),
        (b"RecordDict ", lambda content: content + b" " * (1 << 20)),
        (b"RecordDict ", lambda content: content.replace(b"polyfed", b"elsewhere")[:-1]),
        (b"ArrayRecord ", lambda content: b"MetricRecord " + content[12:]),
        (b"ConfigRecord ", lambda content: content + content[-40:]),
        (b"ConfigRecord ", lambda content: content.replace(b"json", b"text")),
        (b"Message ", lambda content: b"Pickle " + content[8:]),
        (b"Message ", lambda content: b""),
    ],
)
def test_objects_that_are_not_ours_are_refused(kind: bytes, change: Callable[[bytes], bytes]) -> None:
    link = SuperLink(honest())
    link.replace(kind, change)
    refusal = one(link)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.startswith("damaged message: ")
    assert refusal.has_error()


def test_records_that_grow_when_they_are_read_are_refused() -> None:
    for record in (ConfigRecord({"json": [1] * 1000}), ConfigRecord({"json": "{}", "b": 1}), MetricRecord({"a": [1]})):
        assert "damaged message: " in one(SuperLink(RecordDict({"polyfed": record}))).reason


def test_many_empty_objects_are_refused_unseen() -> None:
    link = SuperLink(honest())
    names = [hashlib.sha256(str(k).encode()).hexdigest() for k in range(5000)]
    link.tree = ObjectTree(object_id=link.name, children=[ObjectTree(object_id=name) for name in names])
    assert "message of more than" in one(link).reason
    assert link.bytes == 0


def test_what_is_not_complete_can_be_sent_again() -> None:
    link = SuperLink(honest())
    link.missing = {next(iter(link.objects))}
    refusal = one(link)
    assert isinstance(refusal, Refusal)
    assert not refusal.final
    assert link.received == []


def test_the_bound_is_that_of_what_all_clients_of_a_message_were_asked() -> None:
    limits, known = Limits(message_bytes=1 << 30, text_bytes=2000), ReplySize(1, 5000)
    assert largest_message(limits, [known] * 3) - largest_message(limits, [known]) == 2 * (5000 + 2048 + 2000)
    assert largest_message(limits, [None, known]) - largest_message(limits, [known]) == (1 << 30) + 2000


def test_pulling_ends_where_a_reply_is_larger_than_what_was_asked_for() -> None:
    link = SuperLink(honest(1 << 26))
    refusal = one(link, largest_message(Limits(), [ReplySize(1, 28_000)]))
    assert "the largest possible answer to the request" in refusal.reason
    assert link.bytes == refusal.bytes < 1 << 23


# ---- at a site


@pytest.mark.parametrize(
    ("kind", "most", "reported"),
    [
        ("train.step", MOST, '{"state": "done"}'),
        ("train.step", 3000, '{"error": "message of more than 3,000 bytes'),
        ("query.describe", MOST, "the site's worker died"),
        ("train.steal", 0, "'train.steal' is for an app of the server, and this site runs none"),  # nothing is fetched
    ],
)
def test_a_site_answers_messages_of_polyfed_and_no_other(kind: str, most: int, reported: str) -> None:
    def serve(kind: str, *message: Any) -> Any:
        if kind == "describe":
            raise ConnectionError("the site's worker died")
        return {"state": "done"}, []

    link = SuperLink(honest(4000))
    asked = make_message(Metadata(1, link.name, 7, 1, "", "", 1e9, 0.0, kind), content=RecordDict())
    reply = reply_to(asked, link.tree, most, link.objects.__getitem__, link.received.append, serve, {})
    output = str(reply.error.reason) if reply.has_error() else json.dumps(from_records(reply.content)[0])
    assert output.startswith(reported)
    assert link.received == [link.name]
