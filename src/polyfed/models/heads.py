"""Classifier heads on un-normalised embeddings, of one modality or of several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Fusion = Literal["product", "concat", "both"]


class LinearHead(nn.Linear):
    """Logits [b, classes] from an embedding [b, d]: the plain linear classifier."""

    def __init__(self, dim: int, classes: int, *, bias: bool = True) -> None:
        super().__init__(dim, classes, bias=bias)


class NonNegativeHead(nn.Module):
    """CreamFL's classifier: ``scale * f relu(W)^T``, by default without bias.

    The released code multiplies features by 128 before the classifier; the separation of classes,
    ``CE(relu(W) relu(W)^T, identity)``, is a loss on ``positive_weight``. Weights start positive (the
    absolute values of Xavier's): one that starts below zero would never receive a gradient. A bias may be negative.
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
        return F.linear(self.scale * embedding, self.positive_weight, self.bias)


class FusedHead(nn.Module):
    """Logits over answers from one embedding a modality: ``MLP(h(u_1, ..., u_m))`` with one hidden layer.

    Every embedding is first brought to zero mean and unit variance (layer norm without affine): encoders of different
    modalities differ in scale, and a product would be ruled by the larger. Then h is their elementwise product (as in
    Antol et al., ICCV 2015), their concatenation, or both next to each other. A single embedding is taken as it is.

    Args:
        dim: width d of the embeddings.
        modalities: their number m.
        answers: number of classes.
        fusion: what h is.
        hidden: width of the hidden layer (GELU).
        dropout: share dropped of h and of the hidden layer in training.
    """

    def __init__(
        self, dim: int, modalities: int, answers: int, *, fusion: Fusion, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fusion: Fusion = fusion
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        # a single embedding is taken as it is, whatever the fusion
        parts = {"product": 1, "concat": modalities, "both": modalities + 1}[fusion] if modalities > 1 else 1
        self.hidden = nn.Linear(dim * parts, hidden)
        self.output = nn.Linear(hidden, answers)
        self.dropout = nn.Dropout(dropout)

    @property
    def answers(self) -> int:
        return self.output.out_features

    def fuse(self, embeddings: Sequence[Float[Tensor, "b d"]]) -> Float[Tensor, "b w"]:
        """h of the embeddings, in the order in which they are given."""
        normed: list[Tensor] = [self.norm(embedding) for embedding in embeddings]
        if len(normed) == 1:
            return normed[0]
        # concatenated first, product last
        parts = [] if self.fusion == "product" else normed
        if self.fusion != "concat":
            parts = [*parts, torch.stack(normed).prod(0)]
        return torch.cat(parts, dim=1)

    def forward(self, embeddings: Sequence[Float[Tensor, "b d"]]) -> Float[Tensor, "b answers"]:
        hidden = F.gelu(self.hidden(self.dropout(self.fuse(embeddings))))
        logits: Tensor = self.output(self.dropout(hidden))
        return logits
