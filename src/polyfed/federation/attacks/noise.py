"""Noise in place of updates."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from polyfed.federation.attack import FalseUpdate


class Noise(FalseUpdate):
    """Gaussian noise as long as the update (Blanchard et al., NeurIPS 2017, section 6)."""

    factor: float = Field(default=1.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        noise = torch.randn(rows.shape, generator=stream).to(rows)
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        false: Tensor = noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True) * (self.factor * lengths)
        return false
