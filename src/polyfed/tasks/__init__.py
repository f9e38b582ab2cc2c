"""Tasks, and the mode in which they evaluate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluating(*modules: nn.Module | None) -> Iterator[None]:
    """Run a block in evaluation mode without gradients; afterwards every submodule has its former mode."""
    modes = {part: part.training for module in modules if module is not None for part in module.modules()}
    for part in modes:
        part.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for part, training in modes.items():
            part.training = training
