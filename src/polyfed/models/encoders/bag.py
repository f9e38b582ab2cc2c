"""Bag of words: the mean of word embeddings."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.view import DataContext, InputSpec
from polyfed.models.pooling import masked_mean, valid_positions
from polyfed.models.towers import LocalFeatures, Positions
from polyfed.models.words import WordEncoder, WordTable


class Bag(WordEncoder):
    """Mean of word embeddings, dropout, an optional hidden layer (GELU), projection to d."""

    projecting = ("hidden",)

    dropout: float = Field(default=0.2, ge=0, lt=1, description="share of the mean dropped in training")
    hidden: int | None = Field(default=None, ge=1, description="width of a hidden layer; none by default")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps token ids [b, l] to [b, dim].

        Raises:
            ConfigError: the view gives no tokens, or word vectors cannot be had.
        """
        return _BagModule(self.table(spec, context), spec.pad, dim, self.dropout, self.hidden)


class _BagModule(nn.Module):
    def __init__(self, embedding: WordTable, pad: int, dim: int, dropout: float, hidden: int | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.pad = pad
        width = embedding.embedding_dim
        inner = [] if hidden is None else [nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout)]
        self.project = nn.Sequential(nn.Dropout(dropout), *inner, nn.Linear(hidden or width, dim))

    def forward(self, tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.project(self._mean(tokens))
        return embedding

    def _mean(self, tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b c"]:
        table = self.embedding.weight
        # its kernel holds no words [b, l, c], but has neither a second derivative nor a form for ``vmap`` or an export
        learns = torch.is_grad_enabled() and table.requires_grad
        if learns or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return masked_mean(self.embedding(tokens), valid_positions(tokens, self.pad))
        skipped = self.pad if 0 <= self.pad < len(table) else None
        return F.embedding_bag(tokens, table, mode="mean", padding_idx=skipped)

    def split(self) -> tuple[nn.Module, int]:
        """The word embeddings and their mean; of the layers after these nothing stays."""
        return _BagTrunk(self.embedding, self.pad, self.project[0]), self.embedding.embedding_dim

    def positions(self, tokens: Int64[Tensor, "b l"]) -> Positions:
        return self.project(self.embedding(tokens)), valid_positions(tokens, self.pad)


class _BagTrunk(nn.Module):
    def __init__(self, embedding: WordTable, pad: int, dropout: nn.Module) -> None:
        super().__init__()
        self.embedding, self.pad, self.dropout = embedding, pad, dropout

    def forward(self, tokens: Int64[Tensor, "b l"]) -> LocalFeatures:
        mask = valid_positions(tokens, self.pad)
        words = self.dropout(self.embedding(tokens))
        return LocalFeatures(masked_mean(words, mask), words, mask)
