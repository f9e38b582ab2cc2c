"""The transport: in what floating type tensors cross the wire. An option of the payload layer, not of a method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field

from polyfed.core.settings import Settings
from polyfed.wire.payload import Payload, PublicRows, TensorBundle, Weights, settled

Encoding = Literal["float32", "float16", "bfloat16"]
_WIRE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@torch.no_grad()
def _converted(bundle: TensorBundle, before: torch.dtype, after: torch.dtype) -> TensorBundle:
    """The bundle with tensors of one type in another, ``settled``; itself where that changes none."""
    if before == after and bundle.is_settled:
        return bundle
    tensors = {name: settled(value.to(after) if value.dtype == before else value) for name, value in bundle.items()}
    is_same = all(value is bundle[name] for name, value in tensors.items())
    return bundle if is_same else type(bundle)(tensors=tensors, **bundle.attributes())


class Transport(Settings):
    """How tensors are encoded on the wire; receivers get fp32 back."""

    dtype: Encoding = Field(default="float32", description="type in which fp32 tensors cross, but for the keys below")
    representations: Encoding | None = Field(default=None, description="type of representations, scores; None: dtype")
    weights: Encoding | None = Field(default=None, description="type of weights; None: dtype")

    def encode(self, payload: Payload) -> Payload:
        """The payload as it crosses the wire."""
        return self.encoder()(payload)

    def encoder(self) -> Callable[[Payload], Payload]:
        """``encode`` for several payloads: what they share is encoded once and stays shared."""
        return _each(lambda item: _converted(item, torch.float32, self._dtype(item)))

    def decode(self, payload: Payload) -> Payload:
        """The payload as the receiver sees it."""
        return _each(lambda item: _converted(item, self._dtype(item), torch.float32))(payload)

    def _dtype(self, item: TensorBundle) -> torch.dtype:
        rows = self.representations if isinstance(item, PublicRows) else None
        return _WIRE[(self.weights if isinstance(item, Weights) else rows) or self.dtype]


def _each(change: Callable[[TensorBundle], TensorBundle]) -> Callable[[Payload], Payload]:
    """``change`` for every bundle; what is the same is changed once."""
    # keys hold ids of tensors; the originals are kept, so that no other tensor gets such an id meanwhile
    made: dict[Any, tuple[TensorBundle, TensorBundle]] = {}

    def changed(item: TensorBundle) -> TensorBundle:
        if item.identity not in made:
            made[item.identity] = item, change(item)
        return made[item.identity][1]

    def changed_all(payload: Payload) -> Payload:
        new = {name: changed(item) for name, item in payload.bundles.items()}
        if all(item is payload.fields[name] for name, item in new.items()):
            return payload  # what is known of it stays known
        return Payload({name: new.get(name, item) for name, item in payload.fields.items()})

    return changed_all
