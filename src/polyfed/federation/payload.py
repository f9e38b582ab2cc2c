"""Payloads: all that crosses between server and clients, its encoding and its exact size.

A payload is a set of named fields; a field is a scalar or an artefact, that is, named tensors of a declared kind.
On the wire it is one safetensors blob whose metadata holds the scalars and the structure as JSON; nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, ClassVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from polyfed.errors import PayloadError

Scalar = int | float | str | bool
Field = "Artefact | Scalar"

SCHEMA = 1
_DTYPES = {  # in the order in which safetensors lays tensors out, last first
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_ORDER = {dtype: -position for position, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class Artefact(Mapping[str, Tensor]):
    """Named tensors of one kind. The tensors are shared by reference in-process: whoever receives them only reads."""

    tensors: Mapping[str, Tensor]
    kind: ClassVar[str] = "tensors"

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def attributes(self) -> dict[str, Scalar]:
        """What the artefact says beside its tensors."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "tensors"}

    def require_finite(self, what: str) -> None:
        """Raise PayloadError if any value is NaN or infinite."""
        floating = {name: tensor for name, tensor in self.tensors.items() if tensor.is_floating_point()}
        if _surely_finite(floating.values()):
            return
        for name, tensor in floating.items():
            if not bool(torch.isfinite(tensor).all()):
                raise PayloadError(f"{what}: tensor '{name}' has NaN or infinite values")


def _surely_finite(tensors: Iterable[Tensor]) -> bool:
    # a sum with a term that is not finite is not finite; it takes a thirtieth of the time of isfinite, and all
    # sums together are one wait for a GPU. A sum that merely overflows says nothing.
    sums = [tensor.sum().float() for tensor in tensors]
    return not sums or bool(torch.stack([value.to(sums[0].device) for value in sums]).isfinite().all())


@dataclass(frozen=True)
class Weights(Artefact):
    """Model parameters and buffers by name."""

    kind: ClassVar[str] = "weights"


@dataclass(frozen=True)
class Representations(Artefact):
    """Representations of the public set, modality -> [|P|, d], in the order that ``order`` identifies."""

    order: str = ""
    kind: ClassVar[str] = "representations"

    def require(self, order: str, rows: int, dim: int, modalities: tuple[str, ...]) -> None:
        """Raise PayloadError unless these are fp representations [rows, dim] of the public set ``order``."""
        if self.order != order:
            raise PayloadError(f"representations of another public set or order ({self.order}, expected {order})")
        if tuple(self) != modalities:
            raise PayloadError(f"representations of {list(self)}, expected {list(modalities)}")
        for name, tensor in self.items():
            if tuple(tensor.shape) != (rows, dim) or not tensor.is_floating_point():
                raise PayloadError(
                    f"representations of '{name}' are {tensor.dtype} {list(tensor.shape)}, expected [{rows}, {dim}]"
                )


KINDS: dict[str, type[Artefact]] = {cls.kind: cls for cls in (Artefact, Weights, Representations)}


@dataclass(frozen=True)
class Payload:
    """Named fields of a message."""

    fields: Mapping[str, Artefact | Scalar] = field(default_factory=dict)

    @property
    def artefacts(self) -> dict[str, Artefact]:
        """The fields that hold tensors."""
        return {name: value for name, value in self.fields.items() if isinstance(value, Artefact)}

    @property
    def scalars(self) -> dict[str, Scalar]:
        """The other fields."""
        return {name: value for name, value in self.fields.items() if not isinstance(value, Artefact)}

    def require_finite(self) -> None:
        """Raise PayloadError if any tensor or number is NaN or infinite."""
        for name, artefact in self.artefacts.items():
            artefact.require_finite(name)
        for name, value in self.scalars.items():
            if isinstance(value, float) and not value - value == 0.0:
                raise PayloadError(f"{name} is {value}")


def encode(payload: Payload) -> bytes:
    """The bytes that cross the wire."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _flat(payload).items()}
    return safetensors.torch.save(tensors, metadata={"polyfed": _structure(payload)})


def decode(blob: bytes) -> Payload:
    """The payload of ``encode``.

    Raises:
        PayloadError: the bytes are damaged, or of another schema version.
    """
    try:
        length = int.from_bytes(blob[:8], "little")
        structure = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["polyfed"])
        tensors = safetensors.torch.load(blob)
    except (ValueError, KeyError, safetensors.SafetensorError) as error:
        raise PayloadError(f"damaged message: {error}") from error
    if structure["schema"] != SCHEMA:
        raise PayloadError(f"message of schema {structure['schema']}, this polyfed speaks {SCHEMA}: use equal versions")
    content: dict[str, Artefact | Scalar] = dict(structure["scalars"])
    for name, (kind, attributes, names) in structure["artefacts"].items():
        content[name] = KINDS[kind](tensors={key: tensors[f"{name}/{key}"] for key in names}, **attributes)
    return Payload(content)


def encoded_size(payload: Payload) -> int:
    """``len(encode(payload))`` without encoding: data, plus the JSON header padded to eight bytes, plus its length."""
    return _size(_structure(payload), tuple((name, value.dtype, value.shape) for name, value in _flat(payload).items()))


@lru_cache(maxsize=64)  # the messages of a round are of few kinds
def _size(structure: str, tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    header: dict[str, Any] = {"__metadata__": {"polyfed": structure}}
    offset = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (_ORDER[tensor[1]], tensor[0])):
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + offset


def tensor_bytes(artefact: Artefact) -> int:
    """Bytes of the tensor data alone."""
    return sum(tensor.numel() * tensor.element_size() for tensor in artefact.values())


def _flat(payload: Payload) -> dict[str, Tensor]:
    return {f"{name}/{key}": tensor for name, item in payload.artefacts.items() for key, tensor in item.items()}


def _structure(payload: Payload) -> str:
    artefacts = {name: (item.kind, item.attributes(), list(item)) for name, item in payload.artefacts.items()}
    return json.dumps({"schema": SCHEMA, "scalars": payload.scalars, "artefacts": artefacts}, separators=(",", ":"))
