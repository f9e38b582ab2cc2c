"""A stand-in for an accelerator: tensors with values that refuse what CUDA refuses, on any machine.

A tensor of the device holds one on the CPU, with which everything is computed, random draws included. What would raise
an error on a GPU raises one here: tensors of two devices in one operator, unless those on the CPU are single numbers
of an operator by elements; an index on the device into a tensor on the CPU; a generator of the CPU for a draw on the
device; ``numpy()``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)  # over which backward passes run in the thread of the CPU
_ATEN = torch.ops.aten
_MOVES = {_ATEN.copy_.default, _ATEN._foreach_copy_.default}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
_TAKES_NUMBERS = {*_INDEXED, _ATEN.masked_fill.Tensor, _ATEN.masked_fill_.Tensor, _ATEN.fill_.Tensor}


class OnDevice(Tensor):
    """A tensor of the device, over one on the CPU."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> OnDevice:
        return OnDevice(inner["inner"])

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: OnDevice) -> None:
        self.inner = value.inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def __repr__(self) -> str:
        return f"OnDevice({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Makes tensors of the device where they are made of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    own, wanted = [value for value in tensors if isinstance(value, OnDevice)], kwargs.get("device")
    there = bool(own) if wanted is None else torch.device(wanted).type == DEVICE.type
    if not own and not there:
        return func(*args, **kwargs)
    _require_one_device(func, args, kwargs, tensors)
    if there and kwargs.get("generator") is not None:
        raise RuntimeError(f"Expected a '{DEVICE.type}' device type for generator but found 'cpu' ({func})")
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if there and not (func in _MOVES and not isinstance(args[0], OnDevice)):
        out = tree_map(lambda value: OnDevice(value) if isinstance(value, Tensor) else value, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _require_one_device(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    if func in _MOVES:
        return
    if func in _INDEXED:
        if not isinstance(args[0], OnDevice):
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({func})")
        tensors = [args[0], *args[2:3]]  # its indices may be on the CPU
    elsewhere = [value for value in tensors if not isinstance(value, OnDevice)]
    numbers = torch.Tag.pointwise in func.tags or func in _TAKES_NUMBERS or func.__name__.startswith("_foreach")
    written = func._schema.is_mutable and args and isinstance(args[0], Tensor) and not isinstance(args[0], OnDevice)
    if len(elsewhere) < len(tensors) and (written or any(value.ndim or not numbers for value in elsewhere)):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu! ({func})"
        )


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """Within the block the device can be used."""
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor would fill memory of the device without a mode's notice
    try:
        with _Factories(), pytest.MonkeyPatch.context() as patch:
            # tensors of inference mode have no views of others, and precision is full
            patch.setattr("torch.inference_mode", lambda mode=True: torch.no_grad() if mode else nullcontext())
            patch.setattr("torch.is_autocast_enabled", lambda *_: False)
            patch.setattr("torch.autocast", _autocast)
            module = sys.modules[torch.optim.Optimizer.__module__]
            patch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", DEVICE.type])
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


def _autocast(device: str, *_: Any, enabled: bool = True, **__: Any) -> AbstractContextManager[None]:
    assert not enabled
    return nullcontext()
