"""Classifier heads on un-normalised embeddings."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class LinearHead(nn.Linear):
    """Logits [b, classes] from an embedding [b, d]: the plain linear classifier."""

    def __init__(self, dim: int, classes: int, *, bias: bool = True) -> None:
        super().__init__(dim, classes, bias=bias)


class NonNegativeHead(nn.Module):
    """CreamFL's classifier: ``scale * f relu(W)^T``, by default without bias.

    The released code multiplies features by 128 before the classifier; the separation of classes,
    ``CE(relu(W) relu(W)^T, identity)``, is a loss on ``positive_weight``. Weights start positive (the
    absolute values of Xavier's): one that starts below zero would never receive a gradient.

    Args:
        dim: width d of the embedding.
        classes: number of classes.
        scale: factor on the embedding.
        bias: whether to add a bias, which may be negative.
    """

    def __init__(self, dim: int, classes: int, *, scale: float = 128.0, bias: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(classes, dim)).abs())
        self.bias = nn.Parameter(torch.zeros(classes)) if bias else None

    @property
    def positive_weight(self) -> Float[Tensor, "classes d"]:
        """``relu(W)``, the weights in effect."""
        return self.weight.relu()

    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        """Logits."""
        return F.linear(self.scale * embedding, self.positive_weight, self.bias)
