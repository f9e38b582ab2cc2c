"""The layout of messages on a wire: JSON, and the raw little-endian bytes of tensors. Nothing is pickled.

A message is JSON that holds the scalars and refers to *parts*; a part is one artefact, a JSON header and one buffer a
tensor. An artefact that several messages share is one part, so a broadcast is laid out once however many clients it
goes to. Packing copies no tensor that is on the CPU and contiguous, and unpacking copies none whose bytes arrived on a
boundary of 64: its tensors are then read-only views of what arrived.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyfed.errors import PayloadError
from polyfed.federation.limits import Limits
from polyfed.federation.parts import Part
from polyfed.federation.payload import KINDS, Artefact, Payload, Scalar, settled

SCHEMA = 2
"""Version of this layout; both sides of a message must speak the same."""

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_UNCHECKED = "-" * 8


def pack(payloads: Mapping[str, Payload], *, checksums: bool = False) -> tuple[dict[str, str], list[Part]]:
    """Lay out messages: name -> JSON that refers to parts by position, and the parts, each artefact once.

    Args:
        payloads: name of a message (a client) -> what it says.
        checksums: add a CRC-32 of each part's bytes, for wires that do not check by themselves.
    """
    parts: list[Part] = []
    known: dict[Any, int] = {}

    def place(artefact: Artefact) -> int:
        key = identity(artefact)
        if key not in known:
            known[key] = len(parts)
            parts.append(pack_part(artefact, checksums=checksums))
        return known[key]

    messages = {
        name: _message(payload, {field: place(artefact) for field, artefact in payload.artefacts.items()})
        for name, payload in payloads.items()
    }
    return messages, parts


def unpack(message: str, parts: Sequence[Part], limits: Limits) -> Payload:
    """The payload of a message.

    Raises:
        PayloadError: it is damaged, of another schema, of an unknown kind or type, or beyond the limits.
    """
    content = _parsed(message)
    if content.get("schema") != SCHEMA:
        raise PayloadError(
            f"message of schema {content.get('schema')}, this polyfed speaks {SCHEMA}: use equal versions of polyfed"
        )
    try:
        places, scalars = dict(content["parts"]), dict(content["scalars"])
        order = list(content["fields"])
        chosen = {name: parts[places[name]] for name in places}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise PayloadError(f"damaged message: {type(error).__name__}: {error}") from error
    _require_within(chosen.values(), limits)
    fields: dict[str, Artefact | Scalar] = {name: unpack_part(part) for name, part in chosen.items()}
    fields |= {name: _scalar(name, value) for name, value in scalars.items()}
    if sorted(order) != sorted(fields):
        raise PayloadError(f"damaged message: fields {sorted(fields)} where {sorted(order)} are announced")
    return Payload({name: fields[name] for name in order})


def pack_part(artefact: Artefact, *, checksums: bool = False) -> Part:
    """An artefact's header and bytes."""
    buffers = [_bytes_of(tensor) for tensor in artefact.values()]
    return Part(_header(artefact, _crc(buffers) if checksums else _UNCHECKED), buffers)


def unpack_part(part: Part) -> Artefact:
    """The artefact of a part; its tensors are for reading only, and may be views of the part's bytes.

    Raises:
        PayloadError: the header or the bytes are damaged, or of an unknown kind or type.
    """
    header = _parsed(part.header)
    try:
        kind, attributes, crc = KINDS[header["kind"]], dict(header["attributes"]), header["crc"]
        specs = [(str(name), _DTYPES[dtype], tuple(map(int, shape))) for name, dtype, shape in header["tensors"]]
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadError(f"damaged message: part with {type(error).__name__}: {error}") from error
    if len(specs) != len(part.buffers):
        raise PayloadError(f"damaged message: {len(part.buffers)} tensors where {len(specs)} are announced")
    if crc not in (_UNCHECKED, _crc(part.buffers) if crc != _UNCHECKED else ""):
        raise PayloadError("damaged message: the bytes do not match their checksum")
    raws = zip(specs, part.buffers, strict=True)
    tensors = {name: _tensor(name, dtype, shape, raw) for (name, dtype, shape), raw in raws}
    try:
        return kind(tensors=tensors, **attributes)
    except TypeError as error:
        raise PayloadError(f"damaged message: {kind.kind}: {error}") from error


def identity(artefact: Artefact) -> Any:
    """Equal for artefacts that hold the very same tensors under the same names."""
    attributes = tuple(artefact.attributes().items())
    return artefact.kind, attributes, tuple((name, id(tensor)) for name, tensor in artefact.items())


def wire_size(payload: Payload) -> int:
    """Bytes of a message and its parts, without packing them."""
    places = {name: 0 for name in payload.artefacts}
    text = len(_message(payload, places).encode())
    return text + sum(_part_size(artefact) for artefact in payload.artefacts.values())


def _part_size(artefact: Artefact) -> int:
    specs = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in artefact.items())
    return _header_size(artefact.kind, tuple(artefact.attributes().items()), specs) + tensor_bytes(artefact)


def tensor_bytes(artefact: Artefact) -> int:
    """Bytes of the tensor data alone."""
    return sum(tensor.numel() * tensor.element_size() for tensor in artefact.values())


@lru_cache(maxsize=64)  # the messages of a round are of few kinds
def _header_size(kind: str, attributes: tuple[tuple[str, Scalar], ...], specs: tuple[Any, ...]) -> int:
    return len(_header_text(kind, dict(attributes), specs, _UNCHECKED).encode())


def _header(artefact: Artefact, crc: str) -> str:
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in artefact.items()]
    return _header_text(artefact.kind, artefact.attributes(), specs, crc)


def _header_text(kind: str, attributes: Mapping[str, Scalar], specs: Iterable[Any], crc: str) -> str:
    tensors = [(name, _NAMES[dtype], shape) for name, dtype, shape in specs]
    content = {"kind": kind, "attributes": attributes, "crc": crc, "tensors": tensors}
    return json.dumps(content, separators=(",", ":"))


def _message(payload: Payload, places: Mapping[str, int]) -> str:
    content = {"schema": SCHEMA, "fields": list(payload.fields), "scalars": payload.scalars, "parts": places}
    return json.dumps(content, separators=(",", ":"))


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PayloadError(f"damaged message: {error}") from error
    if not isinstance(content, dict):
        raise PayloadError(f"damaged message: {type(content).__name__} where an object is expected")
    return content


def _scalar(name: str, value: Any) -> Scalar:
    if not isinstance(value, Scalar):
        raise PayloadError(f"damaged message: {name} is {type(value).__name__}, not a number, text or truth value")
    return value


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    found: memoryview = flat.view(torch.uint8).numpy().data
    return found


def _tensor(name: str, dtype: torch.dtype, shape: tuple[int, ...], raw: memoryview) -> Tensor:
    wanted = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    found = raw.nbytes
    if min(shape, default=0) < 0 or found != wanted:
        raise PayloadError(f"damaged message: tensor '{name}' {list(shape)} has {found} bytes, expected {wanted}")
    if not wanted:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():  # that the memory is read-only is meant: receivers only read
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return settled(torch.frombuffer(raw, dtype=dtype).reshape(shape))


def _crc(buffers: Sequence[memoryview]) -> str:
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return f"{value:08x}"


def _require_within(parts: Iterable[Part], limits: Limits) -> None:
    buffers = [buffer.nbytes for part in parts for buffer in part.buffers]
    if len(buffers) > limits.tensors:
        raise PayloadError(f"message of {len(buffers)} tensors, the limit is {limits.tensors} (limits.tensors)")
    if sum(buffers) > limits.message_bytes:
        raise PayloadError(
            f"message of {sum(buffers):,} bytes, the limit is {limits.message_bytes:,} (limits.message_bytes)"
        )
