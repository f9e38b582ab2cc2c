"""Towers: a trunk that gives a pooled vector and local features, and what turns them into an embedding."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor, nn

from polyfed.models.pie import PIE


class LocalFeatures(NamedTuple):
    """What a trunk says of a batch.

    Attributes:
        pooled: one vector a sample [b, c].
        local: features by position (of a map, or of tokens) [b, l, e].
        mask: true at valid positions [b, l]; None if all are.
        led: the first position is the pooled vector itself, as CLS may be.
    """

    pooled: Float[Tensor, "b c"]
    local: Float[Tensor, "b l e"]
    mask: Bool[Tensor, "b l"] | None = None
    led: bool = False


Positions = tuple[Float[Tensor, "b l d"], Bool[Tensor, "b l"] | None]
"""Features of width d by position, and which positions are valid (None: all)."""


@runtime_checkable
class Splittable(Protocol):
    """An encoder whose trunk can be had without what projects it to width d."""

    def split(self) -> tuple[nn.Module, int]:
        """The trunk, input -> ``LocalFeatures``, and the width of its pooled vector; the encoder itself is used up."""
        ...


def from_map(features: Float[Tensor, "b c h w"]) -> LocalFeatures:
    """Mean and positions of a convolution map."""
    return LocalFeatures(features.mean((2, 3)), features.flatten(2).transpose(1, 2))


class EncoderTower(nn.Module):
    """Trunk, then a linear layer on the pooled vector, then (with ``pie``) attention over the local features.

    Args:
        trunk: maps the input to ``LocalFeatures``.
        width: width c of its pooled vector.
        dim: width d of the embedding.
        pie: width e of its local features if a PIE block is wanted, else None.
        dropout: share of the pooled vector dropped in training.
    """

    def __init__(self, trunk: nn.Module, width: int, dim: int, *, pie: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.trunk = trunk
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(width, dim)
        self.pie = None if pie is None else PIE(pie, dim)

    def split(self) -> tuple[nn.Module, int]:
        """The trunk, and the width c of its pooled vector."""
        return self.trunk, self.project.in_features

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding, not normalised."""
        pooled, local, mask, _ = self.trunk(x)
        out: Tensor = self.project(self.dropout(pooled))
        return out if self.pie is None else self.pie(out, local, mask)

    def positions(self, x: Tensor) -> Positions:
        """The local features, each projected as ``forward`` does the pooled vector; without PIE.

        Raises:
            ValueError: the local features have another width than the pooled vector.
        """
        _, local, mask, _ = self.trunk(x)
        if local.shape[-1] != self.project.in_features:
            raise ValueError(
                f"local features of width {local.shape[-1]} do not fit the projection from {self.project.in_features}; "
                "fuse vectors rather than positions"
            )
        return self.project(self.dropout(local)), mask
