"""Parcels as Flower's records: JSON in a ConfigRecord, every part's tensors as raw bytes in an ArrayRecord."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import read_json
from polyfed.wire.frames import Frame

_FACTS = "polyfed"
_TEXT_BYTES = 1 << 26  # of all clients of a node together


def to_records(
    facts: dict[str, object], parts: Sequence[Frame], record: Callable[[Frame], ArrayRecord] | None = None
) -> RecordDict:
    """Facts (anything that JSON holds) and parts as the content of a message.

    Args:
        facts: what the message says beside its tensors.
        parts: its tensors.
        record: makes the record of a part; by default ``array_record``.
    """
    text = json.dumps({**facts, "parts": [part.header for part in parts]})
    content = RecordDict({_FACTS: ConfigRecord({"json": text})})
    for number, part in enumerate(parts):
        if part.buffers:
            content[f"part-{number}"] = (record or array_record)(part)
    return content


class SharedRecords:
    """Records of parts that several messages have: each is made once, and copied never."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Frame, ArrayRecord]] = {}  # with the part, whose id must stay taken

    def __call__(self, part: Frame) -> ArrayRecord:
        """The part's record."""
        if id(part) not in self._made:
            self._made[id(part)] = part, array_record(part)
        return self._made[id(part)][1]


def array_record(part: Frame) -> ArrayRecord:
    """A part's tensors as raw bytes."""
    return ArrayRecord({f"{k}": _array(raw) for k, raw in enumerate(part.buffers)})


def from_records(content: RecordDict, most: int = _TEXT_BYTES) -> tuple[dict[str, object], list[Frame]]:
    """The facts and parts of ``to_records``; the parts are views of the message's bytes.

    Args:
        content: of a message.
        most: bytes of text that it may have.

    Raises:
        PayloadError: it was not made by ``to_records``, or its text is beyond the bound.
    """
    try:
        facts = read_json(str(content.config_records[_FACTS]["json"]), most)
        headers = [str(header) for header in facts.pop("parts")]
        parts = [Frame(header, _buffers(content, number)) for number, header in enumerate(headers)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error
    _require_announced(content, len(parts))
    return facts, parts


def _require_announced(content: RecordDict, parts: int) -> None:
    """What no part announces would only take up memory."""
    known = {_FACTS, *(f"part-{number}" for number in range(parts))}
    odd = [str(name) for name in content if name not in known]
    if odd:
        raise PayloadError(f"damaged message: record '{odd[0][:64]}' belongs to none of its {parts} parts")


def _array(raw: memoryview) -> Array:
    return Array(dtype="uint8", shape=(raw.nbytes,), stype="raw", data=bytes(raw))


def _buffers(content: RecordDict, number: int) -> list[memoryview]:
    record = content.array_records.get(f"part-{number}")
    return [] if record is None else [memoryview(record[f"{k}"].data) for k in range(len(record))]
