"""Discriminators: whether a representation comes from the server's model or a client's (BAA of FedAFD, CVPR 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Discriminator(nn.Module):
    """MLP with leaky ReLUs that scores representations: high for global (real) ones, low for local (fake) ones.

    Args:
        dim: width d of the representations.
        hidden: widths of the hidden layers (FedAFD, supplement A.2.1).
        slope: of the leaky ReLUs below zero.
        double_sigmoid: give probabilities, as FedAFD's released code does, although its loss takes logits. Read as
            logits they confine the loss of a real sample to (0.313, 0.693), of a fake one to (0.693, 1.313).
    """

    def __init__(
        self, dim: int, hidden: Sequence[int] = (128, 64), slope: float = 0.2, *, double_sigmoid: bool = False
    ) -> None:
        super().__init__()
        widths = (dim, *hidden)
        inner = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.LeakyReLU(slope))]
        self.layers = nn.Sequential(*inner, nn.Linear(widths[-1], 1))
        self.double_sigmoid = double_sigmoid

    def forward(self, x: Float[Tensor, "b d"]) -> Float[Tensor, " b"]:
        """Logits of being real; probabilities with ``double_sigmoid``."""
        logits: Tensor = self.layers(x).squeeze(-1)
        return torch.sigmoid(logits) if self.double_sigmoid else logits
