"""Envelopes as Flower's records: JSON in a ConfigRecord, every frame's tensors as raw bytes in an ArrayRecord."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import read_json
from polyfed.wire.frames import Frame

_FIELDS = "polyfed"
_TEXT_BYTES = 1 << 26  # of all clients of a node together


def to_records(
    fields: dict[str, object], frames: Sequence[Frame], record: Callable[[Frame], ArrayRecord] | None = None
) -> RecordDict:
    """Fields (anything that JSON holds) and frames as the content of a message.

    Args:
        fields: what the message says beside its tensors.
        frames: its tensors.
        record: makes the record of a frame; by default ``array_record``.
    """
    text = json.dumps({**fields, "parts": [frame.header for frame in frames]})
    content = RecordDict({_FIELDS: ConfigRecord({"json": text})})
    for number, frame in enumerate(frames):
        if frame.buffers:
            content[f"part-{number}"] = (record or array_record)(frame)
    return content


class SharedRecords:
    """Records of frames that several messages have: each is made once, and copied never."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Frame, ArrayRecord]] = {}  # with the frame, whose id must stay taken

    def __call__(self, frame: Frame) -> ArrayRecord:
        """The frame's record."""
        if id(frame) not in self._made:
            self._made[id(frame)] = frame, array_record(frame)
        return self._made[id(frame)][1]


def array_record(frame: Frame) -> ArrayRecord:
    """A frame's tensors as raw bytes."""
    return ArrayRecord({f"{k}": _array(raw) for k, raw in enumerate(frame.buffers)})


def from_records(content: RecordDict, most: int = _TEXT_BYTES) -> tuple[dict[str, object], list[Frame]]:
    """The fields and frames of ``to_records``; the frames are views of the message's bytes.

    Args:
        content: of a message.
        most: bytes of text that it may have.

    Raises:
        PayloadError: it was not made by ``to_records``, or its text is beyond the bound.
    """
    try:
        fields = read_json(str(content.config_records[_FIELDS]["json"]), most)
        headers = [str(header) for header in fields.pop("parts")]
        frames = [Frame(header, _buffers(content, number)) for number, header in enumerate(headers)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error
    _require_announced(content, len(frames))
    return fields, frames


def _require_announced(content: RecordDict, frames: int) -> None:
    """What no frame announces would only take up memory."""
    known = {_FIELDS, *(f"part-{number}" for number in range(frames))}
    odd = [str(name) for name in content if name not in known]
    if odd:
        raise PayloadError(f"damaged message: record '{odd[0][:64]}' belongs to none of its {frames} frames")


def _array(raw: memoryview) -> Array:
    return Array(dtype="uint8", shape=(raw.nbytes,), stype="raw", data=bytes(raw))


def _buffers(content: RecordDict, number: int) -> list[memoryview]:
    record = content.array_records.get(f"part-{number}")
    return [] if record is None else [memoryview(record[f"{k}"].data) for k in range(len(record))]
