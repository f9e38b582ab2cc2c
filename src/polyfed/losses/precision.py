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
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        narrow = {value.dtype for value in tensors if value.dtype.is_floating_point and value.dtype.itemsize < 4}
        # autocast is set by kind of device, and a loss is computed where its tensors are
        device = tensors[0].device.type
        is_off = not torch.is_autocast_enabled(device)
        if is_off and not narrow:
            return function(*args, **kwargs)

        def raised(value: object) -> object:
            return value.float() if isinstance(value, Tensor) and value.dtype in narrow else value

        with nullcontext() if is_off else torch.autocast(device, enabled=False):
            named = {key: raised(value) for key, value in kwargs.items()}
            return function(*map(raised, args), **named)  # type: ignore[arg-type]

    return wrapped
