"""A PyTorch module of one's own that this process has registered under a name."""

from __future__ import annotations

import torch
from pydantic import Field, SerializeAsAny
from torch import nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoder import Encoder
from polyfed.models.registered import registered_module


class Registered(Encoder):
    """A module that ``polyfed.register_module`` was given; models of it are rebuilt only where it is registered."""

    module: str = Field(description="name that it was registered under in this process")
    options: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="arguments of the class or function that makes it"
    )
    view: SerializeAsAny[View] = Field(default=Pixels(), description="how the modality is presented to it")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """The module, and a linear layer where its vectors are not of width ``dim``.

        Raises:
            ConfigError: it is not registered, or does not map what the view gives to vectors.
        """
        module = registered_module(self.module, self.options)
        width = self._width(module, spec)
        return module if width == dim else nn.Sequential(module, nn.Linear(width, dim))

    def _width(self, module: nn.Module, spec: InputSpec) -> int:
        """What the module gives for two samples tells its width."""
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
