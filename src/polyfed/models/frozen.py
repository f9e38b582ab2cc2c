"""Parts of models that are never trained: neither exchanged nor kept, and held once per process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn


class Frozen(nn.Module):
    """A network in evaluation mode that follows from settings, seed and files alone, so that it can be made again.

    Its tensors are no part of ``Model.trained`` and ``Model.exchanged``; a saved model has them in a file of their own.
    Copies of it share one network for each device and type of numbers.

    Attributes:
        digest: size, and digest of what it is made of (``123x0123abcd``): models with others cannot be averaged.
    """

    def __init__(self, module: nn.Module, digest: str) -> None:
        super().__init__()
        module.eval().requires_grad_(False)
        first = next(itertools.chain(module.parameters(), module.buffers()))
        self.digest, self._key = digest, (first.device, first.dtype)
        # in a dictionary it is no submodule, which would be trained, exchanged and saved
        self._shared: dict[tuple[torch.device, torch.dtype], nn.Module] = {self._key: module}

    @property
    def module(self) -> nn.Module:
        return self._shared[self._key]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)

    def tensors(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Have tensors of one's own, as of a saved model; copies made before keep theirs.

        Raises:
            RuntimeError: one is missing, or has another shape.
        """
        for name, value in self.tensors().items():
            shape = list(tensors[name].shape) if name in tensors else None
            if shape != list(value.shape):
                raise RuntimeError(f"frozen '{name}' is {list(value.shape)} in the model, {shape} among those given")
        module = copy.deepcopy(self.module)
        module.load_state_dict(dict(tensors))
        self._shared = {self._key: module}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        device, dtype = self._key
        moved = fn(torch.empty(0, device=device, dtype=dtype))
        key = (moved.device, moved.dtype)
        if key not in self._shared:
            self._shared[key] = copy.deepcopy(self.module)._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._key = key
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        shared = copy.copy(self)
        memo[id(self)] = shared
        return shared


def frozen_parts(model: nn.Module) -> dict[str, Frozen]:
    return {name: part for name, part in model.named_modules() if isinstance(part, Frozen)}


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model that are not exchanged, by the names that they would have in it."""
    return {
        f"{name}.{key}": value for name, part in frozen_parts(model).items() for key, value in part.tensors().items()
    }


def replace_frozen(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of ``frozen_tensors``; tensors of other names are left alone.

    Raises:
        RuntimeError: one is missing, or has another shape.
    """
    for name, part in frozen_parts(model).items():
        prefix = f"{name}."
        part.replace({key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)})
