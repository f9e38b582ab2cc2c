"""PyTorch modules of one's own, registered in this process under a name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from polyfed.core.errors import ConfigError, nearest

_REGISTERED: dict[str, Callable[..., nn.Module] | nn.Module] = {}


def register_module(name: str, module: Callable[..., nn.Module] | nn.Module) -> None:
    """Make a PyTorch module an encoder: ``{name: registered, module: NAME}`` in an experiment.

    It maps what the encoder's view gives, such as pictures [b, 3, size, size] or token ids [b, l], to vectors [b, k]; a
    linear layer to the width d follows where k is another.

    Args:
        name: what experiments call it; one registered before under it is forgotten.
        module: a class or function that makes a module of the encoder's ``options``, called for each client's model; or
            a module, of which each gets a copy with its weights.

    Raises:
        ConfigError: it is neither.
    """
    if not callable(module):  # modules are callable too
        raise ConfigError(f"module '{name}' is a {type(module).__name__}; give a torch.nn.Module, or what makes one")
    _REGISTERED[name] = module


def registered_module(name: str, options: Mapping[str, Any]) -> nn.Module:
    """A new module of those registered in this process.

    Raises:
        ConfigError: none is registered under the name, or it cannot be made with these options.
    """
    if name not in _REGISTERED:
        raise ConfigError(
            f"no module is registered as '{name}' in this process; call polyfed.register_module('{name}', ...) before, "
            f"or write an encoder in a file (docs/tutorials/own-method.md); {nearest(name, _REGISTERED)}"
        )
    made = _REGISTERED[name]
    if isinstance(made, nn.Module):
        if options:
            raise ConfigError(f"module '{name}' is ready and takes no options; remove {', '.join(options)}")
        return copy.deepcopy(made)
    try:
        module = made(**options)
    except TypeError as error:
        raise ConfigError(f"module '{name}' cannot be made with options {dict(options)}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"what is registered as '{name}' makes a {type(module).__name__}, not a torch.nn.Module")
    return module
