"""Messages as Flower carries them: JSON in a ConfigRecord, every frame's tensors as raw bytes in an ArrayRecord.

Includes the ClientApp of a simulation, which serves such messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import read_json
from polyfed.wire.limits import Frame

MessageFields = dict[str, object]
"""JSON of a message, in addition to its frames."""

Serve = Callable[[str, MessageFields, Sequence[Frame], Mapping[str, Any]], tuple[MessageFields, Sequence[Frame]]]
"""Maps action (describe or step), fields and frames of a message, and the node's configuration, to the reply's."""

_FIELDS = "polyfed"
_TEXT_BYTES = 1 << 26  # for all clients of a node together


def client_app(serve: Serve) -> ClientApp:
    """The ClientApp of a simulated node."""
    app = ClientApp()

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        return Message(answered_message("describe", message.content, context.node_config, serve), reply_to=message)

    @app.train("step")
    def step(message: Message, context: Context) -> Message:
        return Message(answered_message("step", message.content, context.node_config, serve), reply_to=message)

    return app


def answered_message(action: str, content: Any, config: Mapping[str, Any], serve: Serve) -> RecordDict:
    """Content of the reply to a message; see ``Serve``."""
    try:
        fields, frames = from_records(content)
    except PayloadError as error:
        return to_records({"error": str(error)}, [])
    return to_records(*serve(action, fields, frames, dict(config)))


def to_records(
    fields: Mapping[str, object], frames: Sequence[Frame], record: Callable[[Frame], ArrayRecord] | None = None
) -> RecordDict:
    """Fields and frames as the content of a message.

    Args:
        fields: JSON of the message, in addition to its tensors.
        frames: Tensors of the message.
        record: Makes the record of a frame; by default a new one.
    """
    text = json.dumps({**fields, "parts": [frame.header for frame in frames]})
    content = RecordDict({_FIELDS: ConfigRecord({"json": text})})
    for number, frame in enumerate(frames):
        if frame.buffers:
            content[f"part-{number}"] = (record or _array_record)(frame)
    return content


class SharedRecords:
    """Records of frames shared by several messages: each is made once, and never copied."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Frame, ArrayRecord]] = {}  # with the frame, whose id must stay taken

    def __call__(self, frame: Frame) -> ArrayRecord:
        if id(frame) not in self._made:
            self._made[id(frame)] = frame, _array_record(frame)
        return self._made[id(frame)][1]


def _array_record(frame: Frame) -> ArrayRecord:
    # raw bytes: Flower's own codec, numpy's save and load, takes twice as long to write and the same again to read
    arrays = {str(k): Array("uint8", (raw.nbytes,), "raw", bytes(raw)) for k, raw in enumerate(frame.buffers)}
    return ArrayRecord(arrays)


def from_records(content: RecordDict, most: int = _TEXT_BYTES) -> tuple[dict[str, Any], list[Frame]]:
    """The fields and frames of ``to_records``; the frames are views of the message's bytes.

    Args:
        content: Content of a message.
        most: Largest size of its text in bytes.

    Raises:
        PayloadError: the content was not made by ``to_records``, or its text is beyond the bound.
    """
    try:
        fields = read_json(str(content.config_records[_FIELDS]["json"]), most)
        frames = []
        for number, header in enumerate(fields.pop("parts")):
            record: Mapping[str, Array] = content.array_records.get(f"part-{number}") or {}
            frames.append(Frame(str(header), [memoryview(record[str(k)].data) for k in range(len(record))]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error
    announced = {_FIELDS, *(f"part-{number}" for number in range(len(frames)))}
    odd = [str(name) for name in content if name not in announced]
    if odd:  # it would only take memory
        raise PayloadError(f"damaged message: record '{odd[0][:64]}' belongs to none of its {len(frames)} frames")
    return fields, frames
