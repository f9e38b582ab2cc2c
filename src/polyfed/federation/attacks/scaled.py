"""Scaled updates."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from polyfed.federation.attack import FalseUpdate


class Scaled(FalseUpdate):
    """The update many times as long, so that it replaces the others' (Bagdasaryan et al., AISTATS 2020)."""

    factor: float = Field(default=10.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        return self.factor * rows
