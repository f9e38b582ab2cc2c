"""Small text transformer trained from scratch (Vaswani et al., NeurIPS 2017; pre-norm)."""

from __future__ import annotations

from typing import Literal, Self

import torch
from jaxtyping import Int64
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor, nn

from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoder import Encoder, token_length
from polyfed.models.pooling import masked_mean, valid_positions
from polyfed.models.towers import EncoderTower, LocalFeatures
from polyfed.models.words import embedding_table


class Transformer(Encoder):
    """Word and position embeddings, pre-norm layers, the first token or the mean of all projected to d.

    ``pooling: first`` reads the text's own first token where ``pooling: cls`` puts a learnt one before it.
    """

    view: SerializeAsAny[View] = Tokens()
    width: int = Field(default=128, ge=2, description="width of the tokens")
    layers: int = Field(default=2, ge=1, description="number of layers")
    heads: int = Field(default=4, ge=1, description="attention heads; must divide `width`")
    expansion: int = Field(default=4, ge=1, description="width of the MLP over `width`")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="dropout within the layers")
    pooling: Literal["cls", "first", "mean"] = Field(default="mean", description="which tokens make the embedding")
    mask_padding: bool = Field(default=True, description="keep padding out of attention; off only in FedCola's code")
    pie: bool = Field(default=False, description="attention over the tokens (PVSE)")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"heads {self.heads} does not divide width {self.width}")
        return self

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps token ids [b, l] to [b, dim].

        Raises:
            ConfigError: the view gives no tokens.
        """
        trunk = _TransformerTrunk(self, spec, token_length(spec, "transformer"), context)
        return EncoderTower(trunk, self.width, dim, pie=self.width if self.pie else None)


class _TransformerTrunk(nn.Module):
    def __init__(self, settings: Transformer, spec: InputSpec, length: int, context: DataContext) -> None:
        super().__init__()
        width = settings.width
        self.pad = spec.pad
        self.pooling = settings.pooling
        self.mask_padding = settings.mask_padding
        self.embedding = embedding_table(spec, context, width=width)
        # no draw: the other weights are the same with and without it
        self.cls = nn.Parameter(torch.zeros(1, 1, width)) if settings.pooling == "cls" else None
        self.positions = nn.Parameter(torch.randn(length + 1, width) * 0.02)
        self.dropout = nn.Dropout(settings.dropout)
        layer = nn.TransformerEncoderLayer(
            width,
            settings.heads,
            settings.expansion * width,
            settings.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            # nested tensors would cut the output to the longest text of the batch
            layer,
            settings.layers,
            norm=nn.LayerNorm(width),
            enable_nested_tensor=False,
        )

    def forward(self, tokens: Int64[Tensor, "b l"]) -> LocalFeatures:
        mask = valid_positions(tokens, self.pad)
        x = self.embedding(tokens)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1)
            mask = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
        x = self.dropout(x + self.positions[: x.shape[1]])
        ignored = None
        if self.mask_padding:  # never the first position, so that an empty text stays finite
            ignored = torch.cat([torch.zeros_like(mask[:, :1]), ~mask[:, 1:]], dim=1)
        x = self.layers(x, src_key_padding_mask=ignored)
        led = self.pooling != "mean"
        return LocalFeatures(x[:, 0] if led else masked_mean(x, mask), x, mask, led)
