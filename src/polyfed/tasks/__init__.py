"""Tasks, and the mode in which they evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from polyfed.models.model import Embedder


@contextlib.contextmanager
def evaluating(*modules: Embedder | nn.Module | None) -> Iterator[None]:
    """Run a block in evaluation mode without gradients; afterwards every submodule has its former mode."""
    modes = {part: part.training for module in modules if isinstance(module, nn.Module) for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
