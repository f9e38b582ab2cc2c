"""The transport: in what form tensors cross the wire. An option of the payload layer, not of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.settings import Settings
from polyfed.wire.compression import Compression, compressed, decompressed, settled_bundle
from polyfed.wire.limits import Limits
from polyfed.wire.payload import BUNDLE_KINDS, Coded, Payload, Prototypes, PublicRows, TensorBundle, Weights

Encoding = Literal["float32", "float16", "bfloat16", "int8"]
_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_NOTHING: Mapping[str, Tensor] = {}
_REMEMBERED = 8  # bundles of a broadcast, one for each type of client


class Transport(Settings):
    """How tensors are encoded on the wire; receivers get fp32 back.

    A reply may be encoded against the request that it answers: a field is then a new version of the field of the same
    name and kind. Both sides have the request, so nothing is remembered from one exchange to the next.
    """

    dtype: Encoding = Field(
        default="float32",
        description="type in which fp32 tensors cross, unless a key below says otherwise; int8: eight-bit integers "
        "with a scale for each row",
    )
    representations: Encoding | None = Field(
        default=None, description="type of representations, scores and prototypes; None: dtype"
    )
    weights: Encoding | None = Field(default=None, description="type of weights; None: dtype")
    topk: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="in replies, the share of each weight matrix's entries that cross, those that moved farthest from "
        "what was received; None: all",
    )
    unchanged: Literal["send", "omit"] = Field(
        default="send", description="in replies, tensors that are bit for bit as received: sent again, or left out"
    )

    @property
    def refers(self) -> bool:
        return self.topk is not None or self.unchanged == "omit"

    def encode(self, payload: Payload, received: Payload | None = None) -> Payload:
        """The payload as it crosses the wire.

        Args:
            payload: a request, or a reply.
            received: of a reply: the request that it answers, as the client received it.
        """
        return self._each(self._encoded)(payload, received)

    def encoder(self) -> Callable[[Payload], Payload]:
        """``encode`` for several requests: what they share is encoded once and stays shared."""
        encode = self._each(self._encoded)
        return lambda payload: encode(payload, None)

    def decode(self, payload: Payload, received: Payload | None = None, limits: Limits | None = None) -> Payload:
        """The payload as the receiver sees it.

        Args:
            payload: what arrived.
            received: of a reply: the request that it answers, as the client received it.
            limits: on what it unpacks to.

        Raises:
            PayloadError: a compressed bundle is damaged, or refers to what was not sent.
        """
        return self._each(self._decoded(limits or Limits()))(payload, received)

    def decoder(self, limits: Limits) -> Callable[[Payload], Payload]:
        """``decode`` for requests, one after the other: of what they share, the latest is decoded once."""
        decode = self._each(self._decoded(limits), _REMEMBERED)
        return lambda payload: decode(payload, None)

    def _compression(self, kind: type[TensorBundle]) -> Compression:
        own = self.representations if issubclass(kind, PublicRows | Prototypes) else None
        is_weights = issubclass(kind, Weights)
        dtype = _WIRE[(self.weights if is_weights else own) or self.dtype]
        return Compression(dtype, self.topk if is_weights else None, self.unchanged == "omit")

    def _encoded(self, item: TensorBundle, known: Mapping[str, Tensor]) -> TensorBundle:
        return compressed(item, self._compression(type(item)), known)

    def _decoded(self, limits: Limits) -> Callable[[TensorBundle, Mapping[str, Tensor]], TensorBundle]:
        def decode(item: TensorBundle, known: Mapping[str, Tensor]) -> TensorBundle:
            if isinstance(item, Coded):
                return decompressed(item, self._compression(BUNDLE_KINDS.get(item.of, TensorBundle)), known, limits)
            short = self._compression(type(item)).whole
            if short == torch.float32 and item.is_settled:
                return item
            return settled_bundle(
                item, {name: value.float() if value.dtype == short else value for name, value in item.items()}
            )

        return decode

    def _each(
        self, change: Callable[[TensorBundle, Mapping[str, Tensor]], TensorBundle], most: int | None = None
    ) -> Callable[[Payload, Payload | None], Payload]:
        """``change`` for every bundle; what is the same is changed once, of the last ``most``."""
        # keys hold ids of tensors; the originals are kept, so that no other tensor gets such an id meanwhile
        made: dict[Any, tuple[TensorBundle, Any, TensorBundle]] = {}

        def changed(item: TensorBundle, known: TensorBundle | None) -> TensorBundle:
            key = item.identity, None if known is None else known.identity
            if key not in made:
                made[key] = item, known, change(item, _NOTHING if known is None else known)
            made[key] = made.pop(key)  # the latest come last
            if most is not None and len(made) > most:
                del made[next(iter(made))]
            return made[key][2]

        def changed_all(payload: Payload, received: Payload | None) -> Payload:
            known = received.bundles if received is not None and self.refers else {}
            return Payload(
                {
                    name: changed(item, known.get(name)) if isinstance(item, TensorBundle) else item
                    for name, item in payload.fields.items()
                }
            )

        return changed_all
