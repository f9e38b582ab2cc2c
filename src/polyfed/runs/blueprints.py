"""What the clients of a deployment say of their models: asked once, kept in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch

from polyfed.core.errors import PayloadError
from polyfed.federation.client import ClientInfo
from polyfed.federation.state import flatten, unflatten
from polyfed.federation.types import Blueprint
from polyfed.models.slots import decode_places, encode_places
from polyfed.runs.folder import RunFolder

_FILE = "blueprint.safetensors"
_TYPES = (torch.float32, torch.int64, torch.bool)  # of tensors that a client may describe


def collected_blueprints(
    clients: Sequence[ClientInfo],
    folder: RunFolder,
    ask: Callable[[tuple[ClientInfo, ...]], Mapping[str, Blueprint]],
) -> dict[str, Blueprint]:
    """Architecture -> blueprint; ``ask`` puts the question to one client of each, unless the folder knows.

    Architectures go by number in the file: their names have slashes.

    Raises:
        PayloadError: a client described its model wrongly.
    """
    names = list(dict.fromkeys(client.architecture for client in clients))
    if folder.tensors(_FILE) is None:
        first = {client.architecture: client for client in reversed(clients)}  # the earliest of each wins
        _save(names, _sound(ask(tuple(client for client in clients if client in first.values()))), folder)
    tensors, texts = unflatten(folder.tensors(_FILE) or {}), folder.metadata(_FILE)
    return {name: Blueprint(tensors[str(k)], decode_places(texts[str(k)])) for k, name in enumerate(names)}


def _save(names: Sequence[str], blueprints: Mapping[str, Blueprint], folder: RunFolder) -> None:
    numbered = {str(k): blueprints[name] for k, name in enumerate(names)}
    texts = {number: encode_places(blueprint.places) for number, blueprint in numbered.items()}
    folder.save_tensors(_FILE, flatten({number: blueprint.tensors for number, blueprint in numbered.items()}), texts)


def _sound(blueprints: Mapping[str, Blueprint]) -> Mapping[str, Blueprint]:
    for architecture, blueprint in blueprints.items():
        odd = sorted(set(chain(blueprint.tensors, blueprint.places)) - (set(blueprint.tensors) & set(blueprint.places)))
        if odd:
            raise PayloadError(f"a client with '{architecture}' describes tensor or slot of '{odd[0]}', but not both")
        for name, tensor in blueprint.tensors.items():
            if tensor.dtype not in _TYPES:
                valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
                raise PayloadError(
                    f"a client with '{architecture}' says that '{name}' is {str(tensor.dtype).removeprefix('torch.')}; "
                    f"models have {valid}"
                )
    return blueprints
