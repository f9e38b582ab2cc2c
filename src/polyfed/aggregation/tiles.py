"""Tiles of a |P| x |P| matrix of logits that is never held: their size, type and range."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RANGE = 80.0
"""Logits within +-80 bits need no shift: 2^80 x 10^9 terms and 2^-80 are both normal fp32 numbers."""


class TileSize(NamedTuple):
    """Size of a tile."""

    rows: int
    columns: int

    @classmethod
    def suited(cls, device: torch.device) -> TileSize:
        """1 MiB tiles that stay in a core's cache, or 32 MiB ones that fill a GPU."""
        return cls(256, 1024) if device.type == "cpu" else cls(4096, 2048)


def working_dtype(local: Tensor, other: Tensor) -> torch.dtype:
    """The wider of both types, and fp32 at least."""
    return torch.promote_types(torch.promote_types(local.dtype, other.dtype), torch.float32)


def largest_logit(local: Tensor, other: Tensor) -> float:
    """Bound on |u_k . g_j| by Cauchy-Schwarz: 1 for unit vectors."""
    norms = [torch.linalg.vector_norm(side, dim=1, dtype=working_dtype(side, side)).amax() for side in (local, other)]
    return float(norms[0] * norms[1])
