"""From pictures, texts and features to tokens of one width: what blocks of a transformer start from."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import InputSpec
from polyfed.models.blocks import SPREAD
from polyfed.models.encoder import check_patches
from polyfed.models.pooling import valid_positions

Embedded = tuple[Float[Tensor, "b l w"], Bool[Tensor, "b l"] | None]


class Embedding(nn.Module):
    """From an input to tokens of width w with their positions, after ``prefix`` tokens that are not the input's."""

    role: ClassVar[str] = "embedding"
    prefix: ClassVar[int]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @abstractmethod
    def forward(self, x: Tensor) -> Embedded:
        """Tokens [b, l, w] and a mask [b, l], true where valid, at least once a row; None if all are."""


class _LedEmbedding(Embedding):
    """Tokens after a learnt CLS token."""

    prefix: ClassVar[int] = 1

    def __init__(self, width: int, count: int) -> None:
        super().__init__(width)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * SPREAD)
        self.positions = nn.Parameter(torch.randn(1, count + 1, width) * SPREAD)

    def led(self, tokens: Float[Tensor, "b n w"]) -> Float[Tensor, "b n+1 w"]:
        # positions are added to CLS as well (ViT)
        tokens = torch.cat([self.cls.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return tokens + self.positions[:, : tokens.shape[1]]


class PatchEmbedding(_LedEmbedding):
    """Pictures [b, c, h, w] to CLS and one token a patch, row by row (ViT).

    ``grid`` is the number of patches, of side ``patch``, down and across; ``content`` the number of values of a patch.
    """

    def __init__(self, shape: tuple[int, int, int], width: int, patch: int) -> None:
        channels, height, across = shape
        super().__init__(width, (height // patch) * (across // patch))
        self.patch = patch
        self.grid = (height // patch, across // patch)
        self.content = channels * patch**2
        self.conv = nn.Conv2d(channels, width, patch, stride=patch)

    def patches(self, x: Float[Tensor, "b c down across"]) -> Float[Tensor, "b n q"]:
        (batch, channels), (down, across), p = x.shape[:2], self.grid, self.patch
        # channels last, as in the released code of MAE: the order of what a decoder rebuilds
        tiles = x.reshape(batch, channels, down, p, across, p).permute(0, 2, 4, 3, 5, 1)
        return tiles.reshape(batch, down * across, p * p * channels)

    def forward(self, x: Float[Tensor, "b c down across"]) -> Embedded:
        return self.led(self.conv(x).flatten(2).transpose(1, 2)), None


class FeatureEmbedding(_LedEmbedding):
    """Features by position [b, l, f] to CLS and one token a position; positions that are all zero are padding."""

    def __init__(self, shape: tuple[int, int], width: int) -> None:
        super().__init__(width, shape[0])
        self.grid, self.content = (1, shape[0]), shape[1]
        self.linear = nn.Linear(shape[1], width)

    def patches(self, x: Float[Tensor, "b l f"]) -> Float[Tensor, "b l f"]:
        """The features themselves: what a masked autoencoder rebuilds of a picture that is known by features only."""
        return x

    def forward(self, x: Float[Tensor, "b n f"]) -> Embedded:
        # (x != 0).any: padding of cached features is written as zeros
        return self.led(self.linear(x)), _first_valid(nn.functional.pad((x != 0).any(-1), (1, 0)))


class WordEmbedding(Embedding):
    """Token ids [b, l] to word + position + token type (0 everywhere), then a layer norm (BERT)."""

    prefix: ClassVar[int] = 0

    def __init__(self, spec: InputSpec, width: int) -> None:
        super().__init__(width)
        self.pad = spec.pad
        self.words = nn.Embedding(len(spec.vocabulary), width, padding_idx=spec.pad)
        self.positions = nn.Embedding(spec.shape[0], width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Int64[Tensor, "b l"]) -> Embedded:
        # token type 0 everywhere: there is one text, and pretrained tables have two types
        tokens = self.words(x) + self.positions.weight[: x.shape[1]] + self.types.weight[0]
        return self.norm(tokens), _first_valid(valid_positions(x, self.pad))


def embedding_of(spec: InputSpec, width: int, patch: int) -> Embedding:
    """The embedding of an encoder ``blocks`` for an input.

    Raises:
        ConfigError: it is neither pictures nor token ids nor features by position, or patches do not fit.
    """
    # by the shape alone: no modality is known by its name
    match spec.shape, bool(spec.vocabulary):
        case (channels, height, across), False:
            shape = (channels, height, across)
            check_patches(shape, patch, "blocks")
            return PatchEmbedding(shape, width, patch)
        case (length, features), False:
            return FeatureEmbedding((length, features), width)
        case (_,), True:
            return WordEmbedding(spec, width)
    words = f" and a vocabulary of {len(spec.vocabulary)}" if spec.vocabulary else ""
    raise ConfigError(
        "encoder 'blocks' needs images [channels, height, width], token ids [length] with a vocabulary or features "
        f"by position [length, width], its view gives shape {list(spec.shape)}{words}; set its view to pixels, tokens "
        "or features with pool: tokens"
    )


def _first_valid(mask: Bool[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
    """The mask with its first column true, so that attention is finite without any token."""
    return torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], dim=1)
