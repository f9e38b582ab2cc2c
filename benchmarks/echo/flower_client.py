"""The echo's ClientApp without polyfed: raw bytes in, raw bytes out."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

client = ClientApp()


def encoded(values: np.ndarray[Any, np.dtype[np.float32]]) -> ArrayRecord:
    """An array as Flower carries it, without a codec."""
    return ArrayRecord({"0": Array(dtype="float32", shape=values.shape, stype="raw", data=values.tobytes())})


def decoded(record: ArrayRecord) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A view of the bytes of ``encoded``."""
    raw = record["0"]
    return np.frombuffer(raw.data, dtype=np.float32).reshape(raw.shape)


@client.train("echo")
def echo(message: Message, context: Context) -> Message:
    """Add the number that came with the array."""
    values = decoded(message.content.array_records["values"])
    addend = message.content.config_records["facts"]["addend"]
    assert isinstance(addend, float)
    return Message(RecordDict({"values": encoded(values + addend)}), reply_to=message)
