"""Messages at a SuperLink, pulled within bounds: what is too large never gets into this process as a whole.

A message is stored at the SuperLink as a tree of objects: records, arrays, and chunks of arrays. Its sizes are known
only as the objects come, so they are pulled one after the other, and pulling ends with the one that is too many. An
array may name one chunk many times; what it would unfold to is counted before it is unfolded.
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

_OVERHEAD = 1024  # bytes of memory that an object takes beside its content
_FRAMING = 1 << 20  # bytes that one of Flower's own records takes, at most
_DIVIDER = b"\x00"  # between head and body of an object
_KINDS = (b"Message", b"RecordDict", b"ArrayRecord", b"Array")


@dataclass(frozen=True)
class Refusal:
    """Stands for a message that is not taken, as an error of Flower's does.

    Attributes:
        reason: why, in one line.
        final: whether it makes no sense to ask again.
        bytes: that were pulled of the message.
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
    """Bytes that a message may have as it is stored, whose parts are expected to be so large; None: not known."""
    sizes = [size or ReplySize(0, limits.message_bytes) for size in expected]
    # Flower stores an object for each array, and at least one for its bytes
    arrays = sum(min(size.bytes, limits.message_bytes) + 2 * _OVERHEAD * size.tensors for size in sizes)
    return arrays + len(sizes) * limits.text_bytes + _FRAMING


def pulled(grid: Any, names: Sequence[str], most: int) -> Iterator[tuple[str, Any]]:
    """Replies that have arrived, by the names of the messages that they answer; a Refusal in place of what is too much.

    Args:
        grid: Flower's grid.
        names: of the messages whose replies are wanted.
        most: bytes that a reply may have.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:  # a simulation, where the reply is in this process already
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
    """A message at the SuperLink, or why it is not taken; either way the SuperLink need not keep it.

    Args:
        name: of the message.
        tree: names of the objects that it consists of.
        most: bytes that it may have.
        pull: fetches an object.
        confirm: tells the SuperLink that it need not keep a message.
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
    except Exception as error:  # of any kind: it was made of what somebody else sent
        return Refusal(f"damaged message: {type(error).__name__}: {error}", bytes=came[0])
    if not hasattr(message, "has_error"):
        return Refusal(f"damaged message: {type(message).__name__} where a message is expected", bytes=came[0])
    message.metadata.__dict__["_message_id"] = name  # Flower gives ids no public setter
    return message


def _contents(tree: Any, most: int, pull: Callable[[str], bytes], came: list[int]) -> dict[str, bytes]:
    """Object -> its content, with all that the message consists of; ``came`` counts the bytes that have arrived.

    Raises:
        PayloadError: it would be larger than ``most``.
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
        raise PayloadError(f"message of more than {most:,} bytes, which is all that is taken of what was asked for")


def _require_plain(content: bytes, most: int) -> None:
    """Refuse an object that is none of ours, or that would take far more memory than its content.

    Records of text are one text and nothing else: lists of small numbers grow many times when they are read.
    """
    kind, _, _ = content[:64].partition(b" ")
    if kind == b"ConfigRecord":
        # the protocol buffer's items > key and value > text; each must be the last and only one of what it is in
        item = _only_field(memoryview(content)[content.find(_DIVIDER) + 1 :], b"\n")
        if bytes(item[:6]) != b"\n\x04json":
            raise PayloadError("damaged message: a record with another key than its text's")
        _only_field(_only_field(item[6:], b"\x12"), b"*")
    elif kind != b"ArrayChunk":
        bound = {b"Array": 4096 + 128 * (most >> 20)}.get(kind, _FRAMING)
        if kind not in _KINDS or len(content) > bound:
            raise PayloadError(f"damaged message: {kind[:32]!r} of {len(content):,} bytes does not belong in it")


def _only_field(field: memoryview, tag: bytes) -> memoryview:
    """What a field of a protocol buffer holds that is all there is: a tag, the length as a varint, and the content."""
    size, place, shift = 0, 1, 0
    while place < min(len(field), 11):
        size |= (field[place] & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if field[place - 1] < 0x80:
            break
    if bytes(field[:1]) != tag or size != len(field) - place:
        raise PayloadError("damaged message: a record that is not one text")
    return field[place:]
