"""Encoders made of PyTorch modules that are registered in this process under a name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import Field, SerializeAsAny
from torch import nn

from polyfed.core.errors import ConfigError, nearest
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoder import Encoder

_REGISTERED: dict[str, Callable[..., nn.Module] | nn.Module] = {}


def register_module(name: str, module: Callable[..., nn.Module] | nn.Module) -> None:
    """Make a PyTorch module an encoder: ``{name: registered, module: NAME}`` in an experiment.

    It maps the output of the encoder's view, such as images [b, 3, size, size] or token ids [b, l], to vectors [b, k];
    a linear layer to the width d follows where k differs from d.

    Args:
        name: name in experiments; it replaces a module registered before under it.
        module: a class or function that makes a module from the encoder's ``options``, called for each client's model;
            or a module, which is copied with its weights for each.

    Raises:
        ConfigError: the module is neither.
    """
    if not callable(module):  # modules are callable too
        raise ConfigError(f"module '{name}' is a {type(module).__name__}; give a torch.nn.Module, or what makes one")
    _REGISTERED[name] = module


def registered_module(name: str, options: Mapping[str, Any]) -> nn.Module:
    """A new module of those registered in this process.

    Raises:
        ConfigError: the name is not registered, or the module cannot be made with these options.
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


class Registered(Encoder):
    """A module that ``polyfed.register_module`` was given; models of it are rebuilt only where it is registered."""

    module: str = Field(description="name that it was registered under in this process")
    options: dict[str, bool | int | float | str] = Field(default_factory=dict, description="arguments of its maker")
    view: SerializeAsAny[View] = Field(default=Pixels(), description="how the modality is presented to it")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """The module, and a linear layer where its vectors are not of width ``dim``.

        Raises:
            ConfigError: it is not registered, or does not map the view's output to vectors.
        """
        module = registered_module(self.module, self.options)
        width = self._width(module, spec)
        return module if width == dim else nn.Sequential(module, nn.Linear(width, dim))

    def _width(self, module: nn.Module, spec: InputSpec) -> int:
        """Width of the module's vectors, from its output for two samples."""
        training = module.training
        x = torch.zeros(2, *spec.shape, dtype=torch.int64 if spec.vocabulary else torch.float32)
        try:
            with torch.no_grad():
                y = module.eval()(x)
        except Exception as error:  # a network of any kind may fail in any way
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"encoder module '{self.module}' fails on its view's input {list(x.shape)}: {reason}; change the "
                "module or its view"
            ) from error
        finally:
            module.train(training)
        if not isinstance(y, torch.Tensor) or y.ndim != 2 or len(y) != 2:
            shape = list(y.shape) if isinstance(y, torch.Tensor) else type(y).__name__
            raise ConfigError(f"encoder module '{self.module}' gives {shape} for {list(x.shape)}; it must give [2, k]")
        return y.shape[1]
