"""Types of clients: those whose models can be averaged as a whole, their global models, names of their heads."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from polyfed.aggregation.averaging import GlobalModel
from polyfed.core.errors import PayloadError
from polyfed.data.source import Split
from polyfed.federation.client import ClientInfo
from polyfed.models.slots import TensorSlots
from polyfed.tasks.task import Joint, Task

_DIGEST = re.compile(r"(?<=\d)x[\w-]{8}")  # of the names of classes or of frozen values, in an architecture's
Outline = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a tensor -> its shape and its type of numbers."""


def outline_of(tensors: Mapping[str, Tensor]) -> Outline:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def require_outline(tensors: Mapping[str, Tensor], expected: Outline) -> None:
    """Raise PayloadError, with the first difference, unless these are all tensors of an outline, and no others."""
    # names too: a tensor too many would be averaged into the model
    if (received := outline_of(tensors)) != expected:
        first = min(name for name, _ in set(received.items()) ^ set(expected.items()))
        came, wanted = (_outlined(outline.get(first)) for outline in (received, expected))
        raise PayloadError(f"first at '{first}': {came}, expected {wanted}")


def _outlined(tensor: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "no such tensor" if tensor is None else f"{str(tensor[1]).removeprefix('torch.')} {list(tensor[0])}"


@dataclass(frozen=True)
class Blueprint:
    """An architecture as its clients start: initial tensors by name, and the slot of each."""

    tensors: Mapping[str, Tensor]
    slots: TensorSlots


@dataclass(frozen=True)
class ClientType:
    """Clients of one architecture, the name of which includes that of the task's head.

    Attributes:
        name: name of their group or groups.
        architecture: name of their models' architecture.
        modalities: modalities of the clients.
        clients: clients of the type.
    """

    name: str
    architecture: str
    modalities: tuple[str, ...]
    clients: tuple[ClientInfo, ...]

    def has_head(self, name: str) -> bool:
        return self.architecture.endswith(f"/{name}")


def differently_named(types: Mapping[str, ClientType]) -> list[list[str]]:
    """Types that differ in nothing but the names of equally many classes, or in frozen values: by mistake, perhaps."""
    alike: dict[str, list[str]] = {}
    for name, own in types.items():
        alike.setdefault(_DIGEST.sub("x", own.architecture), []).append(name)
    return [names for names in alike.values() if len(names) > 1]


def by_architecture(clients: Iterable[ClientInfo]) -> dict[str, list[ClientInfo]]:
    members_of: dict[str, list[ClientInfo]] = {}
    for client in clients:
        members_of.setdefault(client.architecture, []).append(client)
    return members_of


def client_types(clients: Sequence[ClientInfo]) -> dict[str, ClientType]:
    """Types by name, in the order of their first clients.

    A type is called after its groups; where one group has several architectures, these are numbered.
    """
    members_of = by_architecture(clients)
    groups = ["+".join(dict.fromkeys(client.group for client in members)) for members in members_of.values()]
    names = [f"{name}-{groups[:k].count(name)}" if groups.count(name) > 1 else name for k, name in enumerate(groups)]
    return {
        name: ClientType(name, architecture, members[0].modalities, tuple(members))
        for name, (architecture, members) in zip(names, members_of.items(), strict=True)
    }


@dataclass
class GlobalModels:
    """A global model for each type of clients.

    Attributes:
        clients: all clients of the federation, in client order.
        blueprint: function that returns initial tensors and slots of every architecture.
        counted: client -> samples that it counts for in averages, where these may be fewer than it joined with.
        weights: type of clients -> tensors by name; none before ``start``.
    """

    clients: tuple[ClientInfo, ...]
    blueprint: Callable[[], Mapping[str, Blueprint]]
    counted: Mapping[str, int] = field(default_factory=dict)
    weights: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def types(self) -> dict[str, ClientType]:
        return client_types(self.clients)

    @cached_property
    def blueprints(self) -> Mapping[str, Blueprint]:
        """Architecture -> initial tensors and their slots; asked for when first needed."""
        return self.blueprint()

    def forget_values(self) -> None:
        """Keep only shapes and slots of the initial tensors."""
        if "blueprints" in vars(self):
            self.blueprints = {
                name: replace(one, tensors={key: value.to("meta") for key, value in one.tensors.items()})
                for name, one in self.blueprints.items()
            }

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {own.architecture: name for name, own in self.types.items()}

    def type_of(self, client: ClientInfo) -> str:
        return self._names[client.architecture]

    def samples(self, *clients: ClientInfo) -> int:
        """Samples that clients count for in averages, together."""
        return sum(self.counted.get(client.id, client.samples) for client in clients)

    def samples_by_type(self, clients: Iterable[ClientInfo]) -> dict[str, float]:
        """Type -> samples that its clients count for."""
        sizes: dict[str, float] = {}
        for client in clients:
            name = self.type_of(client)
            sizes[name] = sizes.get(name, 0.0) + self.samples(client)
        return sizes

    def initial(self, type_name: str) -> Mapping[str, Tensor]:
        """A type's tensors as its clients start; in rounds only their shapes are known."""
        return self.blueprints[self.types[type_name].architecture].tensors

    def start(self, own: Mapping[str, Tensor], device: torch.device) -> None:
        """Initial weights: of tensors of one name and shape the server's ``own``, or those of the first type."""
        common = {(name, value.shape): value for name, value in own.items()}
        for name in self.types:
            first = {key: common.setdefault((key, value.shape), value) for key, value in self.initial(name).items()}
            self.weights[name] = {key: value.to(device, copy=True) for key, value in first.items()}

    def by_type(self) -> dict[str, GlobalModel]:
        """Type -> its global model, as aggregation sees it."""
        models = {}
        for name, own in self.types.items():
            slots, clients = self.blueprints[own.architecture].slots, tuple(client.id for client in own.clients)
            models[name] = GlobalModel(self.weights[name], slots, own.modalities, clients)
        return models


# ---- names of heads


def head_name(task: Task, split: Split, kept_apart: str = "", salt: str = "") -> str:
    """Name of a task's head in ``Model.heads`` and in the name of an architecture; equal where heads mean the same.

    It consists of the task, of those of its settings that shape the head (where they are not the defaults), and, for a
    task with classes, of their names, or, where they have none, of the source that numbers them. Several tasks have the
    names of all.

    Args:
        task: task of the head.
        split: data of the head.
        kept_apart: name of the type in the configuration, if it is kept apart from others that are alike.
        salt: key of the digests of classes, the same at all sites of a run.
    """
    if isinstance(task, Joint):
        names = "+".join(head_name(one, split, salt=salt) for one in task.tasks)
        return ":".join(map(_escaped, [names, "", kept_apart])).rstrip(":")
    parts = [task.component_name()]
    for name in task.shaping_settings():
        value = getattr(task, name)
        if value != type(task).model_fields[name].get_default(call_default_factory=True):
            parts.append(_written(name, value))
    classes = [text for target in task.class_targets for text in (target, type_classes(target, split, salt))] or [""]
    return ":".join(map(_escaped, ["-".join(parts), *classes, *filter(None, [kept_apart])])).rstrip(":")


def type_classes(target: str, split: Split, salt: str = "") -> str:
    """Number and digest of the names of the classes; the source where they have none, outside of which they mean
    nothing."""
    # the order counts: class 0 of one must be class 0 of the other
    if not (names := list(split.classes.get(target) or ())):
        return split.source
    text = json.dumps(names).encode()
    if not salt:
        return f"{len(names)}x{hashlib.sha256(text).hexdigest()[:8]}"
    # 48 bits in as many characters, so that messages are as long as those of records
    return f"{len(names)}x{urlsafe_b64encode(hmac.digest(salt.encode(), text, 'sha256'))[:8].decode()}"


def _escaped(part: str) -> str:
    """A part of a name without what separates parts (``:``) or names of modules (``.``); of two parts two names."""
    return part.replace("%", "%25").replace(".", "%2E").replace(":", "%3A")


def _written(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, str):
        return value
    return "_".join(map(str, [name, *(value if isinstance(value, tuple | list) else [value])]))
