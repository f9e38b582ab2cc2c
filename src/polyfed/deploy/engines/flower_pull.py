"""Messages at a SuperLink, pulled within bounds: a message that is too large never gets into this process completely.

A message is stored at the SuperLink as a tree of objects: records, arrays, and chunks of arrays. Its size is known only
as the objects come, so they are pulled one after the other, and pulling ends with the first one beyond the bound. An
array may contain one chunk many times; its unfolded size is counted before it is unfolded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import PayloadError
from polyfed.wire.limits import Limits, ReplySize

DESCRIPTION_BYTES = 1 << 22
"""Largest description of a node, bytes."""

_OVERHEAD = 1024  # bytes of memory that an object takes in addition to its content
_FRAMING = 1 << 20  # bytes that one of Flower's own records takes, at most
_DIVIDER = b"\x00"  # between head and body of an object
_OBJECTS = (b"Message", b"RecordDict", b"ArrayRecord", b"Array")


@dataclass(frozen=True)
class Refusal:
    """Replacement for a refused message, with the interface of an error of Flower's.

    Attributes:
        reason: Reason in one line.
        final: True if another request would be useless.
        bytes: Bytes of the message that were pulled.
    """

    reason: str
    final: bool = True
    bytes: int = 0

    @property
    def error(self) -> Refusal:
        return self

    def has_error(self) -> bool:
        return True


def largest_message(limits: Limits, expected: Sequence[ReplySize | None]) -> int:
    """Largest stored size in bytes of a message whose parts have these expected sizes; None: unknown."""
    sizes = [size or ReplySize(0, limits.message_bytes) for size in expected]
    # Flower stores an object for each array, and at least one for its bytes
    arrays = sum(min(size.bytes, limits.message_bytes) + 2 * _OVERHEAD * size.tensors for size in sizes)
    return arrays + len(sizes) * limits.text_bytes + _FRAMING


def pulled(grid: Any, names: Sequence[str], most: int) -> Iterator[tuple[str, Any]]:
    """Replies that have arrived, by the names of the answered messages; a Refusal in place of one that is too large.

    Args:
        grid: Flower's grid.
        names: Names of the messages whose replies are wanted.
        most: Largest size of a reply in bytes.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:  # in a simulation the reply is in this process already
        yield from ((message.metadata.reply_to_message_id, message) for message in grid.pull_messages(list(names)))
        return
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.supercore.inflatable import inflatable_protobuf_utils as calls

    run = grid.run.run_id
    pull = calls.make_pull_object_fn_protobuf(client.PullObject, grid.node, run)
    confirm = calls.make_confirm_message_received_fn_protobuf(client.ConfirmMessageReceived, grid.node, run)
    response = client.PullMessages(PullAppMessagesRequest(message_ids=list(names)))
    for stored, tree in zip(response.messages_list, response.message_object_trees, strict=True):
        yield stored.metadata.reply_to_message_id, taken(stored.metadata.message_id, tree, most, pull, confirm)


def taken(name: str, tree: Any, most: int, pull: Callable[[str], bytes], confirm: Callable[[str], object]) -> Any:
    """A message at the SuperLink, or a Refusal; either way it is released there.

    Args:
        name: Name of the message.
        tree: Names of its objects.
        most: Largest size in bytes.
        pull: Fetches an object.
        confirm: Releases a message at the SuperLink.
    """
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents

    came = [0]
    try:
        contents = _contents(tree, most, pull, came)
    except ObjectPullError as error:
        return Refusal(f"it is not complete at the SuperLink: {error}", final=False)
    except PayloadError as error:
        confirm(name)
        return Refusal(str(error), bytes=came[0])
    confirm(name)
    try:
        message: Any = inflate_object_from_contents(name, contents)
    except Exception as error:  # of any class: the content comes from another party
        return Refusal(f"damaged message: {type(error).__name__}: {error}", bytes=came[0])
    if not hasattr(message, "has_error"):
        return Refusal(f"damaged message: {type(message).__name__} where a message is expected", bytes=came[0])
    message.metadata.__dict__["_message_id"] = name  # Flower gives ids no public setter
    return message


def _contents(tree: Any, most: int, pull: Callable[[str], bytes], came: list[int]) -> dict[str, bytes]:
    """Content of each object of the message; ``came`` counts the bytes that have arrived.

    Raises:
        PayloadError: the message would be larger than ``most``.
    """
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    names = list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))
    _require_below(len(names) * _OVERHEAD, most)

    def counted(name: str) -> bytes:
        content = pull(name)
        came[0] += len(content)
        _require_below(came[0], most)
        _require_plain(content, most)
        return content

    # one at a time: pulled side by side, several could be beyond the bound before the first is counted
    contents: dict[str, bytes] = pull_objects(names, counted, max_concurrent_pulls=1)
    arrays = (content for content in contents.values() if content.startswith(b"Array "))
    _require_below(sum(_array_bytes(content, contents) for content in arrays), most)
    return contents


def _array_bytes(content: bytes, contents: Mapping[str, bytes]) -> int:
    head, _, body = content.partition(_DIVIDER)
    try:
        chunks = head.decode().split(" ")[1].split(",")
        return sum(len(contents[chunks[place]]) for place in json.loads(body)["arraychunk_ids"])
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise PayloadError(f"damaged message: array with {type(error).__name__}: {error}") from error


def _require_below(size: int, most: int) -> None:
    if size > most:
        raise PayloadError(f"message of more than {most:,} bytes, the largest possible answer to the request")


def _require_plain(content: bytes, most: int) -> None:
    """Refuse an object that polyfed does not send, or that would take far more memory than its content.

    A record of text holds exactly one text: lists of small numbers grow many times when they are read.
    """
    name, _, _ = content[:64].partition(b" ")
    if name == b"ConfigRecord":
        # the protocol buffer's items > key and value > text; each must be the only one of its parent
        item = _only_field(memoryview(content)[content.find(_DIVIDER) + 1 :], b"\n")
        if bytes(item[:6]) != b"\n\x04json":
            raise PayloadError("damaged message: a record with another key than its text's")
        _only_field(_only_field(item[6:], b"\x12"), b"*")
    elif name != b"ArrayChunk" and (
        name not in _OBJECTS or len(content) > {b"Array": 4096 + 128 * (most >> 20)}.get(name, _FRAMING)
    ):
        raise PayloadError(f"damaged message: {name[:32]!r} of {len(content):,} bytes does not belong in it")


def _only_field(field: memoryview, tag: bytes) -> memoryview:
    """Content of a protocol buffer that has one field: a tag, the length as a varint, and the content."""
    size, place, shift = 0, 1, 0
    while place < min(len(field), 11):
        size |= (field[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if field[place - 1] < 0x80:
            break
    if bytes(field[:1]) != tag or size != len(field) - place:
        raise PayloadError("damaged message: a record that is not one text")
    return field[place:]
