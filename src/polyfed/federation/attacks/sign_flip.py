"""Turned updates."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from polyfed.federation.attack import FalseUpdate


class SignFlip(FalseUpdate):
    """The update with its sign turned (Li et al., RSA, AAAI 2019)."""

    factor: float = Field(default=1.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        return -self.factor * rows
