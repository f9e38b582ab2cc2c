"""Optimiser state as flat tensors by parameter name, for storage and for swapping clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from polyfed.core.errors import PayloadError, nearest

_SEPARATOR = ":"  # between part and parameter, as in exp_avg:encoders.image.conv1.weight


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies of the optimiser's momenta and counters, called ``<part>:<parameter>``.

    Parameters that were never updated have none. Learning rates and other settings are not state: who
    restores builds the optimiser from the same settings.

    Raises:
        PayloadError: a state is not a tensor, so could not be stored.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters:
        for part, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise PayloadError(f"state '{part}' of parameter '{name}' is a {type(value).__name__}; use tensors")
            tensors[f"{part}{_SEPARATOR}{name}"] = value.detach().clone()
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]], tensors: Mapping[str, Tensor]
) -> None:
    """Replace the optimiser's whole state by copies of ``tensors``; training then goes on bit for bit.

    Raises:
        PayloadError: a name is not of this optimiser's parameters, or a shape does not fit; nothing is
            changed then.
    """
    by_name = dict(named_parameters)
    loaded: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        part, _, name = key.partition(_SEPARATOR)
        if name not in by_name:
            raise PayloadError(f"state '{part}' belongs to no parameter '{name}' here; {nearest(name, by_name)}")
        if value.ndim and value.shape != by_name[name].shape:
            raise PayloadError(
                f"state '{part}' of parameter '{name}' has shape {tuple(value.shape)}, not "
                f"{tuple(by_name[name].shape)}; restore it into the architecture that it was saved from"
            )
        # with the parameter's strides, which the fused kernels take for granted; stored tensors are contiguous
        copied = torch.empty_like(by_name[name], dtype=value.dtype) if value.ndim else torch.empty_like(value)
        loaded.setdefault(name, {})[part] = copied.detach().copy_(value.detach())
    # a state dict knows parameters by their running number in the groups, not by name
    names = {id(parameter): name for name, parameter in by_name.items()}
    ordered = [names.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    state["state"] = {index: loaded[name] for index, name in enumerate(ordered) if name in loaded}
    optimizer.load_state_dict(state)
