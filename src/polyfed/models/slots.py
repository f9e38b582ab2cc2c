"""Named parameter slots: the place of each tensor in a model, from the model's structure and never from its name.

A slot is (modality, role). Modules have their role in an attribute ``role``; a tensor has that of the nearest module
around it with one. An aggregation rule can so select the attention of the text encoder under any parameter names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import nn

from polyfed.core.errors import PayloadError
from polyfed.core.untrusted import read_json
from polyfed.models.model import Model

HEAD, EXTRA, SHARED, TRUNK = "head", "extra", "final_norm", "trunk"


class Slot(NamedTuple):
    """A group of parameters: one role in the encoder of a modality.

    For a head or a method's module ``modality`` is its name; for parts that modalities share, ``a+b``.
    """

    modality: str
    role: str

    def __str__(self) -> str:
        return f"{self.modality}/{self.role}"


@dataclass(frozen=True)
class TensorSlot:
    """The slot of a tensor, and its name there.

    Attributes:
        slot: modality and role.
        key: name within the encoder (head, addition): equal for tensors that can be averaged across modalities.
        frozen: (modality, digest) of the frozen values used with it; for a head those of all encoders.
    """

    slot: Slot
    key: str
    frozen: tuple[tuple[str, str], ...] = ()


TensorSlots = Mapping[str, TensorSlot]
"""Name of a tensor in the state dict -> its slot."""


def model_slots(model: Model) -> dict[str, TensorSlot]:
    """The slot of every tensor that a model exchanges, in the order of sending and averaging."""
    return {name: _slot_of(model, *name.split(".", 1)) for name in model.exchanged()}


def _slot_of(model: Model, part: str, name: str) -> TensorSlot:
    frozen = tuple(model.frozen.items())
    if part == "final_norm":
        # shared by modalities, so it is exchangeable only among clients that have the same ones
        return TensorSlot(Slot("+".join(model.modalities), SHARED), name, frozen)
    owner, _, key = name.partition(".")
    if part == "encoders":
        own = tuple(entry for entry in frozen if entry[0] == owner)
        return TensorSlot(Slot(owner, _role(model.encoders[owner], key)), key, own)
    return TensorSlot(Slot(owner, HEAD if part == "heads" else EXTRA), key, frozen)


def _role(module: nn.Module, key: str) -> str:
    role = getattr(module, "role", TRUNK)
    for part in key.split(".")[:-1]:
        module = module.get_submodule(part)
        role = getattr(module, "role", role)
    return str(role)


def encode_slots(slots: TensorSlots) -> str:
    return json.dumps([[name, *own.slot, own.key, *own.frozen] for name, own in slots.items()])


def require_slots(text: str) -> None:
    """Raise PayloadError unless ``decode_slots`` reads the text."""
    decode_slots(text)


def decode_slots(text: str) -> dict[str, TensorSlot]:
    """The inverse of ``encode_slots``.

    Raises:
        PayloadError: the text does not describe a model's parameters.
    """
    try:
        rows = read_json(text)
        slots = {
            name: TensorSlot(Slot(modality, role), key, tuple((owner, digest) for owner, digest in frozen))
            for name, modality, role, key, *frozen in rows
        }
        frozen = [part for own in slots.values() for entry in own.frozen for part in entry]
        if not all(isinstance(part, str) for part in chain(frozen, *(row[:4] for row in rows))):
            raise TypeError("a name is not a text")
    except (ValueError, TypeError) as error:
        raise PayloadError(f"not a description of a model's parameters: {error}") from error
    return slots
