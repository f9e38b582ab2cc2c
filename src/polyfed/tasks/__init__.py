"""Tasks, and the mode in which they evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from polyfed.models.model import Embedder


@contextlib.contextmanager
def evaluating(*modules: Embedder | nn.Module | None, inference: bool = True) -> Iterator[None]:
    """Run a block in evaluation mode without gradients; afterwards every submodule has its former mode.

    Tensors made in it may enter no graph later on, unless ``inference`` is off.
    """
    modes = {part: part.training for module in modules if isinstance(module, nn.Module) for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        with torch.inference_mode() if inference else torch.no_grad():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
