"""Types of clients: those whose models can be averaged as a whole, and what the server knows of their models."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.federation.client import ClientInfo
from polyfed.models.slots import TensorPlaces

_DIGEST = re.compile(r"(?<=\d)x[0-9a-f]{8}")  # of the names of classes, in the name of a head
Outline = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a tensor -> its shape and its type of numbers."""


def outline_of(tensors: Mapping[str, Tensor]) -> Outline:
    """What tensors are like."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Blueprint:
    """An architecture as its clients start: initial tensors by name, and the slot of each."""

    tensors: Mapping[str, Tensor]
    places: TensorPlaces


@dataclass(frozen=True)
class ClientType:
    """Clients of one architecture, the name of which includes that of the task's head.

    Attributes:
        name: that of their group, or of their groups.
        architecture: of their models.
        modalities: that they have.
        clients: who they are.
    """

    name: str
    architecture: str
    modalities: tuple[str, ...]
    clients: tuple[ClientInfo, ...]

    def has_head(self, name: str) -> bool:
        """Whether the task's head has this name."""
        return self.architecture.endswith(f"/{name}")


def differently_named(types: Mapping[str, ClientType]) -> list[list[str]]:
    """Types that differ in nothing but the names of equally many classes: by mistake, perhaps."""
    alike: dict[str, list[str]] = {}
    for name, kind in types.items():
        alike.setdefault(_DIGEST.sub("x", kind.architecture), []).append(name)
    return [names for names in alike.values() if len(names) > 1]


def client_types(clients: Sequence[ClientInfo]) -> dict[str, ClientType]:
    """Types by name, in the order of their first clients.

    A type is called after its groups; where one group has several architectures, these are numbered.
    """
    members: dict[str, list[ClientInfo]] = {}
    for client in clients:
        members.setdefault(client.architecture, []).append(client)
    names = ["+".join(dict.fromkeys(client.group for client in found)) for found in members.values()]
    counted = [f"{name}-{names[:k].count(name)}" if names.count(name) > 1 else name for k, name in enumerate(names)]
    return {
        name: ClientType(name, architecture, found[0].modalities, tuple(found))
        for name, (architecture, found) in zip(counted, members.items(), strict=True)
    }
