"""The transport: in what form tensors cross the wire. An option of the payload layer, not of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field

from polyfed.core.settings import Settings
from polyfed.wire.compression import compressed, decompressed
from polyfed.wire.limits import Limits
from polyfed.wire.payload import BUNDLE_KINDS, Coded, Payload, Prototypes, PublicRows, TensorBundle, Weights

Encoding = Literal["float32", "float16", "bfloat16", "int8"]
_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


class Transport(Settings):
    """How tensors are encoded on the wire; receivers get fp32 back."""

    dtype: Encoding = Field(
        default="float32",
        description="type in which fp32 tensors cross, unless a key below says otherwise; int8: eight-bit integers "
        "with a scale for each row",
    )
    representations: Encoding | None = Field(
        default=None, description="type of representations, scores and prototypes; None: dtype"
    )
    weights: Encoding | None = Field(default=None, description="type of weights; None: dtype")

    def encode(self, payload: Payload) -> Payload:
        """The payload as it crosses the wire."""
        return self.encoder()(payload)

    def encoder(self) -> Callable[[Payload], Payload]:
        """``encode`` for several payloads: what they share is encoded once and stays shared."""
        return _each(lambda item: compressed(item, self._dtype(type(item))))

    def decode(self, payload: Payload, limits: Limits | None = None) -> Payload:
        """The payload as the receiver sees it.

        Args:
            payload: what arrived.
            limits: on what it unpacks to.

        Raises:
            PayloadError: a compressed bundle is damaged.
        """

        def decoded(item: TensorBundle) -> TensorBundle:
            dtype = self._dtype(BUNDLE_KINDS.get(item.of, TensorBundle) if isinstance(item, Coded) else type(item))
            # beside quantised tensors, others cross whole
            return decompressed(item, torch.float32 if dtype == torch.int8 else dtype, limits or Limits())

        return _each(decoded)(payload)

    def _dtype(self, kind: type[TensorBundle]) -> torch.dtype:
        rows = self.representations if issubclass(kind, PublicRows | Prototypes) else None
        return _WIRE[(self.weights if issubclass(kind, Weights) else rows) or self.dtype]


def _each(change: Callable[[TensorBundle], TensorBundle]) -> Callable[[Payload], Payload]:
    """``change`` for every bundle; what is the same is changed once."""
    # keys hold ids of tensors; the originals are kept, so that no other tensor gets such an id meanwhile
    made: dict[Any, tuple[TensorBundle, TensorBundle]] = {}

    def changed(item: TensorBundle) -> TensorBundle:
        if item.identity not in made:
            made[item.identity] = item, change(item)
        return made[item.identity][1]

    def changed_all(payload: Payload) -> Payload:
        fields = payload.fields.items()
        return Payload({name: changed(item) if isinstance(item, TensorBundle) else item for name, item in fields})

    return changed_all
