"""Full precision inside autocast: contrastive losses lose their small differences in 16 bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def in_full_precision(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Run ``function`` with autocast off and its 16-bit floating arguments raised to fp32.

    >>> dtype_of = in_full_precision(lambda x: x.dtype)
    >>> dtype_of(torch.ones(1, dtype=torch.bfloat16))
    torch.float32
    """

    @functools.wraps(function)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        # autocast is set by kind of device, and a loss is computed where its tensors are
        device = next(value.device.type for value in args if isinstance(value, Tensor))
        off = torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
        with off:
            raised = {key: _raised(value) for key, value in kwargs.items()}
            return function(*map(_raised, args), **raised)  # type: ignore[arg-type]

    return wrapped


def _raised(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize < 4:
        return value.float()
    return value
