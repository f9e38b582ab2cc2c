"""Encoder, align module and embedding head of a modality (FedAID, arXiv 2404.03854, section 4.1 and appendix F).

The trunk of an encoder gives features; a few transformer layers and an embedding head turn these into the
representation. Methods can so treat the extraction of features and the alignment of modalities differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings, require_default
from polyfed.models.blocks import PostBlock, TransformerBlock, initialise
from polyfed.models.towers import LocalFeatures, Positions, Splittable

ALIGNER = "aligner"
"""Role of an align module and its embedding head, without its head for positions."""

POSITIONS = "positions"
"""Role of the head for positions: it serves the task alone, no teacher is learnt for it."""

Norm = Literal["pre", "post"]


class Detail(NamedTuple):
    """Features of a batch by an encoder, as a whole and by position.

    Attributes:
        embedding: embedding before normalisation.
        positions: features of width d by position.
        mask: true at valid positions; None: all are.
        attention: attention of the summary to the positions in the last layer, rows sum to one; None: not known.
    """

    embedding: Float[Tensor, "b d"]
    positions: Float[Tensor, "b l d"]
    mask: Bool[Tensor, "b l"] | None = None
    attention: Float[Tensor, "b l"] | None = None


class AlignerSettings(Settings):
    """The align module of every modality: transformer layers over (summary; positions), then an embedding head."""

    layers: int = Field(default=1, ge=1, description="transformer layers")
    heads: int | None = Field(default=None, ge=1, description="attention heads; None: one for about every 64 channels")
    expansion: float = Field(default=4.0, gt=0, le=16, description="hidden width of a layer's MLP, in widths")
    norm: Norm | dict[str, Norm] = Field(default="pre", description="norms as in ViT (pre), BERT (post); or a mapping")
    head: Literal["mlp", "linear"] = Field(default="mlp", description="embedding head")
    hidden: int = Field(default=2048, ge=1, description="hidden width of an mlp head")
    head_norm: Literal["batch", "layer", "none"] = Field(default="batch", description="both norms of an mlp head")
    local: bool = Field(default=False, description="a linear head for positions too, for losses of words and regions")

    @model_validator(mode="after")
    def _head_is_mlp(self) -> Self:
        if self.head != "mlp":
            require_default(self, f"with head: {self.head}", "hidden", "head_norm")
        return self

    def require_modalities(self, modalities: Iterable[str]) -> None:
        """Raise ValueError if ``norm`` names a modality without an encoder."""
        # a misspelt modality would silently be pre-norm
        unknown = sorted(set(self.norm) - set(modalities)) if isinstance(self.norm, dict) else []
        if unknown:
            raise ValueError(f"aligner.norm names '{unknown[0]}', the encoders are {', '.join(modalities)}")

    def around(self, encoder: nn.Module, modality: str, dim: int) -> Aligned:
        """An encoder with an align module in place of its projection.

        Raises:
            ConfigError: the encoder cannot be split, or ``heads`` does not divide its width.
        """
        if not isinstance(encoder, Splittable):
            raise ConfigError(
                f"model.aligner: the encoder of '{modality}' ({type(encoder).__name__}) has no features by position to "
                "align; choose resnet, vit, blocks, bert, gru, bag or hf"
            )
        # uses the encoder up: its projection is gone from here on
        trunk, width = encoder.split()
        # one for about every 64 channels, a number that divides the width
        heads = self.heads or next(count for count in range(max(1, width // 64), 0, -1) if width % count == 0)
        if width % heads:
            raise ConfigError(f"model.aligner.heads {heads} does not divide the width {width} of '{modality}'")
        norm = self.norm.get(modality, "pre") if isinstance(self.norm, dict) else self.norm
        return Aligned(trunk, Aligner(width, dim, heads, norm, self))


class Aligner(nn.Module):
    """Transformer layers over (summary; positions) of width w, and the embedding head on the summary's output.

    Args:
        width: w.
        dim: width d of the embedding.
        heads: attention heads.
        norm: place of the norms in each layer.
        settings: other settings.
    """

    def __init__(self, width: int, dim: int, heads: int, norm: Norm, settings: AlignerSettings) -> None:
        super().__init__()
        # image features come out of a pre-norm ViT, text features of a post-norm BERT
        block, hidden = TransformerBlock if norm == "pre" else PostBlock, round(settings.expansion * width)
        self.width = width
        self.layers = nn.ModuleList(block(width, heads, hidden) for _ in range(settings.layers))
        self.head = embedding_head(width, dim, settings)
        self.local = nn.Linear(width, dim) if settings.local else None
        # layers only: heads keep torch's own start, as in the released code
        self.layers.apply(initialise)
        inner: Iterable[Any] = self.modules()
        for module in inner:
            # every module inside: the roles of its blocks would else pass for the encoder's
            module.role = POSITIONS if module is self.local else ALIGNER

    def forward(self, features: LocalFeatures) -> Float[Tensor, "b d"]:
        """Embedding, not normalised."""
        tokens, mask = sequence(features)
        for layer in self.layers:
            tokens = layer(tokens, mask)
        out: Tensor = self.head(tokens[:, 0])
        return out

    def require_local(self) -> nn.Module:
        """The head for positions; raises ConfigError if there is none."""
        if self.local is None:
            raise ConfigError("the task needs features by position, which this aligner lacks; set model.aligner.local")
        return self.local

    def detail(self, features: LocalFeatures) -> Detail:
        """Embedding, positions, and the attention of the last layer's summary to these, without gradient.

        Raises:
            ConfigError: the aligner has no head for positions.
        """
        local = self.require_local()
        tokens, mask = sequence(features)
        attention = None
        for number, layer in enumerate(self.layers, start=1):
            made = layer(tokens, mask)
            if number == len(self.layers):  # after it: autocast must not remember what no_grad casts
                attention = _shares(layer, tokens, mask)
            tokens = made
        return Detail(self.head(tokens[:, 0]), local(tokens[:, 1:]), None if mask is None else mask[:, 1:], attention)


@torch.no_grad()
def _shares(layer: nn.Module, tokens: Float[Tensor, "b n w"], mask: Tensor | None) -> Float[Tensor, "b l"]:
    assert isinstance(layer, TransformerBlock | PostBlock)
    # the summary attends to itself too, which does not concern positions
    attention = layer.leading(tokens, mask)[:, 1:]
    return attention / attention.sum(1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)


class Aligned(nn.Module):
    """An encoder made of a trunk f (input -> features) and an align module g (features -> embedding)."""

    def __init__(self, trunk: nn.Module, aligner: Aligner) -> None:
        super().__init__()
        self.trunk = trunk
        self.aligner = aligner

    def split(self) -> tuple[nn.Module, int]:
        return self.trunk, self.aligner.width

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding, not normalised."""
        out: Tensor = self.aligner(self.trunk(x))
        return out

    def positions(self, x: Tensor) -> Positions:
        detail = self.detail(x)
        return detail.positions, detail.mask

    def detail(self, x: Tensor) -> Detail:
        return self.aligner.detail(self.trunk(x))


def sequence(features: LocalFeatures) -> tuple[Float[Tensor, "b n w"], Bool[Tensor, "b n"] | None]:
    """The pooled vector as a first token before the positions, and their mask.

    A position that is the pooled vector itself (CLS) comes once.

    Raises:
        ValueError: pooled vector and positions differ in width.
    """
    if features.pooled.shape[-1] != features.local.shape[-1]:
        raise ValueError(
            f"the summary has width {features.pooled.shape[-1]} and positions {features.local.shape[-1]}; an aligner "
            "needs one width for both"
        )
    first, mask = int(features.led), features.mask
    tokens = torch.cat([features.pooled[:, None], features.local[:, first:]], dim=1)
    return tokens, None if mask is None else nn.functional.pad(mask[:, first:], (1, 0), value=True)


def embedding_head(width: int, dim: int, settings: AlignerSettings) -> nn.Module:
    """Linear, or linear, norm, ReLU, linear, norm without affine (as FedDRA's released code, with batch norms)."""
    if settings.head == "linear":
        return nn.Linear(width, dim)
    inner, outer = {
        "batch": (nn.BatchNorm1d(settings.hidden), nn.BatchNorm1d(dim, affine=False)),
        "layer": (nn.LayerNorm(settings.hidden), nn.LayerNorm(dim, elementwise_affine=False)),
        "none": (nn.Identity(), nn.Identity()),
    }[settings.head_norm]
    return nn.Sequential(nn.Linear(width, settings.hidden), inner, nn.ReLU(), nn.Linear(settings.hidden, dim), outer)


def aligned(encoders: Mapping[str, nn.Module] | nn.ModuleDict) -> dict[str, Aligned]:
    return {name: encoder for name, encoder in encoders.items() if isinstance(encoder, Aligned)}
