"""The layout of messages on a wire: JSON, and the raw little-endian bytes of tensors. Nothing is pickled.

A message is JSON that holds the scalars and refers to *frames*; a frame is one bundle, a JSON header and one buffer a
tensor. A bundle that several messages share is one frame, so a broadcast is laid out once however many clients it
goes to. Packing copies no tensor that is on the CPU and contiguous, and unpacking copies none whose bytes arrived on a
boundary of 64: its tensors are then read-only views of what arrived.
"""

from __future__ import annotations

import json
import math
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import TEXT_BYTES, read_json
from polyfed.wire.limits import Frame, Limits
from polyfed.wire.payload import BUNDLE_KINDS, Payload, Scalar, Specs, TensorBundle, settled

SCHEMA = 3
"""Version of this layout; both sides of a message must speak the same."""

_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNCHECKED = "-" * 8  # as long as a CRC-32, so that checksums change no size
_compact = json.JSONEncoder(separators=(",", ":")).encode
_LONGEST = 1 << 40  # elements along one dimension: beyond it are errors only, some of which torch cannot bear


def pack(payloads: Mapping[str, Payload], *, checksums: bool = False) -> tuple[dict[str, str], list[Frame]]:
    """Lay out messages: name -> JSON that refers to frames by position, and the frames, each bundle once.

    Args:
        payloads: name of a message (a client) -> its payload.
        checksums: add a CRC-32 of each frame's bytes, for wires that do not check by themselves.
    """
    frames: list[Frame] = []
    known: dict[Any, int] = {}

    def place(bundle: TensorBundle) -> int:
        key = bundle.identity
        if key not in known:
            known[key] = len(frames)
            frames.append(pack_frame(bundle, checksums=checksums))
        return known[key]

    messages = {
        name: _message(payload, {field: place(bundle) for field, bundle in payload.bundles.items()})
        for name, payload in payloads.items()
    }
    return messages, frames


def unpack(message: str, frames: Sequence[Frame], limits: Limits) -> Payload:
    """The payload of a message and of its frames, each of which some field of it refers to.

    Raises:
        PayloadError: it is damaged, of another schema, of an unknown kind or type, or beyond the limits.
    """
    require_within(message, frames, limits)
    content = parsed_object(message, limits.text_bytes)
    if content.get("schema") != SCHEMA:
        raise PayloadError(
            f"message of schema {content.get('schema')}, this polyfed speaks {SCHEMA}: use equal versions of polyfed"
        )
    try:
        indices, scalars = _mapping(content["parts"]), _mapping(content["scalars"])
        order = [_text(name) for name in content["fields"]]
        chosen = {name: frames[whole_number(place)] for name, place in indices.items()}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error
    if sorted(order) != sorted([*indices, *scalars]):
        raise PayloadError(
            f"damaged message: fields {sorted([*indices, *scalars])} where {sorted(order)} are announced"
        )
    if unused := sorted({*range(len(frames))} - {*indices.values()}):  # it would only take up memory
        raise PayloadError(f"damaged message: no field refers to frame {unused[0]} of its {len(frames)}")
    fields: dict[str, TensorBundle | Scalar] = {name: unpack_frame(frame, limits) for name, frame in chosen.items()}
    for name, value in scalars.items():
        if not isinstance(value, Scalar):
            raise PayloadError(f"damaged message: {name} is {type(value).__name__}, not a number, text or truth value")
        fields[name] = value
    return Payload({name: fields[name] for name in order})


def pack_frame(bundle: TensorBundle, *, checksums: bool = False) -> Frame:
    """A bundle's header and bytes."""
    buffers: list[memoryview] = []
    for tensor in bundle.values():
        buffers.append(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    crc = _crc(buffers) if checksums else _UNCHECKED
    return Frame(_header(bundle.label, bundle.attributes(), bundle.specs, crc), buffers)


def unpack_frame(frame: Frame, limits: Limits | None = None) -> TensorBundle:
    """The bundle of a frame; its tensors are for reading only, and may be views of the frame's bytes.

    Raises:
        PayloadError: the header or the bytes are damaged, or of an unknown kind or type.
    """
    header = parsed_object(frame.header, (limits or Limits()).text_bytes)
    try:
        cls, attributes, crc = BUNDLE_KINDS[header["kind"]], _mapping(header["attributes"]), _text(header["crc"])
        specs = [
            (_text(name), _DTYPES[dtype], tuple(map(whole_number, shape))) for name, dtype, shape in header["tensors"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadError(f"damaged message: frame with {type(error).__name__}: {error}") from error
    require_attributes(cls, attributes)
    if len(specs) != len(frame.buffers) or len({name for name, _, _ in specs}) != len(specs):
        raise PayloadError(
            f"damaged message: {len(frame.buffers)} tensors where {len(specs)} with names of their own are announced"
        )
    if crc not in (_UNCHECKED, _crc(frame.buffers) if crc != _UNCHECKED else ""):
        raise PayloadError("damaged message: the bytes do not match their checksum")
    raws = zip(specs, frame.buffers, strict=True)
    tensors = {name: _tensor(name, dtype, shape, raw) for (name, dtype, shape), raw in raws}
    return cls(tensors=tensors, **attributes)


def wire_size(payload: Payload) -> int:
    """Bytes of a message and its frames, without packing them."""
    frames = {bundle.identity: bundle for bundle in payload.bundles.values()}
    numbers = {key: number for number, key in enumerate(frames)}
    positions = {name: numbers[bundle.identity] for name, bundle in payload.bundles.items()}
    size = len(_message(payload, positions).encode())
    for bundle in frames.values():
        size += _header_size(bundle.label, tuple(bundle.attributes().items()), bundle.specs) + tensor_bytes(bundle)
    return size


def tensor_bytes(bundle: TensorBundle) -> int:
    return sum([tensor.nbytes for tensor in bundle.values()])


@lru_cache(maxsize=64)  # the messages of a round are of few kinds
def _header_size(label: str, attributes: tuple[tuple[str, Scalar], ...], specs: Specs) -> int:
    return len(_header(label, dict(attributes), specs, _UNCHECKED).encode())


def _header(label: str, attributes: Mapping[str, Scalar], specs: Specs, crc: str) -> str:
    odd = next((dtype for _, dtype, _ in specs if dtype not in _NAMES), None)
    if odd is not None:
        raise PayloadError(f"tensors of {odd} cannot cross; valid: {', '.join(_DTYPES)}")
    tensors = [(name, _NAMES[dtype], shape) for name, dtype, shape in specs]
    return _compact({"kind": label, "attributes": attributes, "crc": crc, "tensors": tensors})


def _message(payload: Payload, positions: Mapping[str, int]) -> str:
    content = {"schema": SCHEMA, "fields": list(payload.fields), "scalars": payload.scalars, "parts": positions}
    return _compact(content)


def parsed_object(text: str, most: int = TEXT_BYTES) -> dict[str, Any]:
    """A received JSON object, of at most ``most`` bytes.

    Raises:
        PayloadError: it is not an object, or beyond the bounds of ``read_json``.
    """
    content = read_json(text, most)
    if not isinstance(content, dict):
        raise PayloadError(f"damaged message: {type(content).__name__} where an object is expected")
    return content


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):  # a list of pairs would make one too, with keys that are not names
        raise TypeError(f"{type(value).__name__} where an object is expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def whole_number(value: Any) -> int:
    """A whole number from 0.

    Raises:
        TypeError: it is not.
    """
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is not a whole number from 0")
    return value


def require_attributes(cls: type[TensorBundle], attributes: Mapping[str, Any]) -> None:
    """Raise PayloadError unless these are the attributes of the kind, each of its type."""
    wanted = {item.name: item.default for item in fields_of(cls) if item.name != "tensors"}
    if attributes.keys() != wanted.keys():
        raise PayloadError(f"damaged message: {cls.label} with {sorted(attributes)}, expected {sorted(wanted)}")
    for name, default in wanted.items():
        if type(attributes[name]) is not type(default):
            raise PayloadError(f"damaged message: {cls.label}.{name} is {type(attributes[name]).__name__}")


def _tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    expected = math.prod(shape) * dtype.itemsize
    if not all(0 <= size < _LONGEST for size in shape) or raw.nbytes != expected:
        raise PayloadError(f"damaged message: tensor '{name}' {list(shape)} has {raw.nbytes} bytes, not {expected}")
    if not expected:
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:  # strides beyond 64 bits
            raise PayloadError(f"damaged message: tensor '{name}' {list(shape)}: {error}") from error
    with warnings.catch_warnings():  # that the memory is read-only is meant: receivers only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return settled(torch.frombuffer(raw, dtype=dtype).reshape(shape))


def _crc(buffers: Sequence[memoryview]) -> str:
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return f"{value:08x}"


def require_within(text: str, frames: Sequence[Frame], limits: Limits) -> None:
    """Raise PayloadError if a message's text with the headers of its frames, or its tensors, are beyond the limits."""
    words = len(text) + sum(len(frame.header) for frame in frames)
    if words > limits.text_bytes:
        raise PayloadError(
            f"message with text of {words:,} bytes, the limit is {limits.text_bytes:,} (limits.text_bytes)"
        )
    buffers = [buffer.nbytes for frame in frames for buffer in frame.buffers]
    if len(buffers) > limits.tensors:
        raise PayloadError(f"message of {len(buffers)} tensors, the limit is {limits.tensors} (limits.tensors)")
    if sum(buffers) > limits.message_bytes:
        raise PayloadError(
            f"message of {sum(buffers):,} bytes, the limit is {limits.message_bytes:,} (limits.message_bytes)"
        )
