"""Replies that share no memory with the model that made them."""

from __future__ import annotations

import torch
from torch import Tensor

from polyfed.models.model import Model
from polyfed.wire.payload import Payload


def detached(payload: Payload, model: Model | None) -> Payload:
    """The payload with no tensor that shares memory with the model, which serves the next client next."""
    owners: dict[int, list[Tensor]] = {}
    for tensor in model.exchanged(live=True).values() if model is not None else ():
        owners.setdefault(_memory(tensor), []).append(tensor)

    def own(value: Tensor) -> Tensor:
        sharing = owners.get(_memory(value))
        if sharing is None:
            return value
        if len(sharing) == 1 and sharing[0].shape == value.shape:
            # hand the memory over instead of copying it: weights are loaded into the model before its next use
            sharing[0].data = torch.empty_like(sharing[0])
            del owners[_memory(value)]
            return value
        return value.clone()

    fields = dict(payload.fields)
    for name, bundle in payload.bundles.items():
        tensors = {key: own(value) for key, value in bundle.items()}
        fields[name] = type(bundle)(tensors=tensors, **bundle.attributes())
    return Payload(fields)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
