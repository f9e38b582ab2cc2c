"""Transformer of exchangeable blocks: one architecture for images, texts and features (FedCola, ECCV 2024)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import load, locate
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.blocks import EPS, Embedding, FinalNorm, PatchEmbedding, embedding_of, initialise, stack
from polyfed.models.encoder import Encoder, check_channels
from polyfed.models.towers import LocalFeatures, Positions, masked_mean


class _Plan(NamedTuple):
    width: int
    depth: int
    heads: int
    expansion: float = 4
    eps: float = EPS


_PRESETS = {
    "pico": _Plan(64, 2, 2),
    "nano": _Plan(96, 4, 3),
    "micro": _Plan(128, 6, 4),
    "tiny": _Plan(192, 12, 3),
    "small": _Plan(384, 12, 6),
    "base": _Plan(768, 12, 12),
}

# parameters of a layer: transformers' names -> ours; others are alike
_PARTS = {"layernorm_before": "norm1", "layernorm_after": "norm2", "attention.o_proj": "attention.proj"}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")


class Blocks(Encoder):
    """Embedding, pre-norm blocks, final norm; the CLS token or the mean of the others is the embedding.

    The shape of the view's input decides how it is embedded: images [c, h, w] by patches, tokens [l] with a
    vocabulary like BERT's, features by position [l, f] (all-zero positions are padding) by a linear layer. Texts
    bring their own first token, the others get a learnt CLS token. The result is projected only where its width
    is not d. With ``weights`` (a ViT) the blocks and the final norm come from there, for any input.
    """

    view: SerializeAsAny[View] = Pixels(size=64)
    size: Literal["pico", "nano", "micro", "tiny", "small", "base"] = Field(
        default="nano", description="architecture, unless `weights` bring their own (small is ViT-S)"
    )
    depth: int | None = Field(default=None, ge=1, description="blocks, over `size`; of `weights` the first so many")
    patch: int = Field(default=16, ge=1, description="pixels of a patch's side, unless `pretrained_embedding` has it")
    drop_path: float = Field(default=0.1, ge=0, lt=1, description="stochastic depth of the last block, linear from 0")
    mask_padding: bool = Field(default=True, description="keep padding out of attention; off only in FedCola's code")
    final_norm: bool = Field(default=True, description="norm after the blocks; off if the model has one for all")
    pooling: Literal["cls", "mean"] = Field(default="cls", description="CLS (a text's first) token, or mean of tokens")
    weights: str | None = Field(default=None, description="pretrained ViT: folder, or hub name owner/name")
    pretrained_embedding: bool = Field(default=True, description="embeddings of images from `weights` too")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> BlocksModule:
        """Maps the view's input [b, ...] to [b, dim].

        Raises:
            ConfigError: the view's input has an unsupported shape, or images that patches do not divide; or the
                weights cannot be had, have fewer blocks than ``depth`` or another number of channels.
        """
        source: Any = self._source(context) if self.weights else None
        plan, patch = self._plan(source), self.patch
        pretrains_embedding = bool(self.weights) and self.pretrained_embedding and len(spec.shape) == 3
        if pretrains_embedding:
            check_channels(spec.shape[0], int(source.config.num_channels), "blocks", self.weights)
            patch = int(source.config.patch_size)
        embedding = embedding_of(spec, plan.width, patch)
        blocks = stack(plan.width, plan.depth, plan.heads, plan.expansion, self.drop_path, plan.eps)
        norm = FinalNorm(plan.width, eps=plan.eps) if self.final_norm else nn.Identity()
        module = BlocksModule(embedding, blocks, norm, dim, self.pooling, self.mask_padding)
        module.apply(initialise)  # before pretrained weights: tensors that these lack keep these values
        if source is not None:
            _fill(module, source, embedding if pretrains_embedding else None, str(self.weights))
        return module

    def _source(self, context: DataContext) -> Any:
        from transformers import ViTModel

        folder = locate(str(self.weights), context.weights, key="encoder blocks, weights", hub=context.hub)
        return load(folder, ViTModel, add_pooling_layer=False)

    def _plan(self, source: Any) -> _Plan:
        if source is None:
            plan = _PRESETS[self.size]
            return plan._replace(depth=self.depth or plan.depth)
        name, given = self.weights, source.config
        if given.hidden_act != "gelu":
            raise ConfigError(f"encoder 'blocks' has GELU, weights '{name}' have {given.hidden_act}; take others")
        width, depth = int(given.hidden_size), int(given.num_hidden_layers)
        if self.depth and self.depth > depth:
            raise ConfigError(
                f"encoder 'blocks': depth {self.depth}, but weights '{name}' have {depth} blocks; lower it"
            )
        expansion, heads = given.intermediate_size / width, int(given.num_attention_heads)
        return _Plan(width, self.depth or depth, heads, expansion, float(given.layer_norm_eps))


class Project(nn.Linear):
    """From the width of the blocks to that of the representations."""

    role: ClassVar[str] = "projection"


class BlocksModule(nn.Module):
    """An embedding, blocks, a final norm, pooling and (only where the widths differ) a projection.

    Args:
        embedding: input -> tokens of width w and their mask.
        blocks: ``Block`` modules of width w.
        norm: norm of all tokens after the blocks.
        dim: width d of the result.
        pooling: ``cls`` (first token) or ``mean`` (valid tokens of the input).
        mask_padding: True if attention leaves padding out; ``mean`` does so in any case.
    """

    def __init__(
        self, embedding: Embedding, blocks: nn.ModuleList, norm: nn.Module, dim: int, pooling: str, mask_padding: bool
    ) -> None:
        super().__init__()
        self.embedding, self.blocks, self.norm = embedding, blocks, norm
        self.project = None if embedding.width == dim else Project(embedding.width, dim)
        self.pooling, self.mask_padding = pooling, mask_padding

    def split(self) -> tuple[nn.Module, int]:
        """The same without its projection, input -> ``LocalFeatures``, and the width w of its tokens."""
        return BlocksTrunk(self), self.embedding.width

    def encode(self, tokens: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l w"]:
        """Tokens after the blocks and the final norm; any subset of tokens is allowed, as in a masked autoencoder."""
        # FedCola's code includes padding; pooling leaves it out in any case
        attended = mask if self.mask_padding else None
        for block in self.blocks:
            tokens = block(tokens, attended)
        out: Tensor = self.norm(tokens)
        return out

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding, not normalised."""
        tokens, mask = self.embedding(x)
        pooled = self._pooled(self.encode(tokens, mask), mask)
        return pooled if self.project is None else self.project(pooled)

    def positions(self, x: Tensor) -> Positions:
        tokens, mask = self.embedding(x)
        own = self.encode(tokens, mask)[:, self.embedding.prefix :]
        return own if self.project is None else self.project(own), self._own(mask)

    def local(self, encoded: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None) -> LocalFeatures:
        """Output of ``encode`` as a trunk's features."""
        # a text's first token belongs to it, a learnt CLS does not
        own, led = encoded[:, self.embedding.prefix :], self.pooling == "cls" and not self.embedding.prefix
        return LocalFeatures(self._pooled(encoded, mask), own, self._own(mask), led)

    def _pooled(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        if self.pooling == "cls":
            return tokens[:, 0]
        own = tokens[:, self.embedding.prefix :]
        valid = self._own(mask)
        return own.mean(1) if valid is None else masked_mean(own, valid)

    def _own(self, mask: Tensor | None) -> Tensor | None:
        return None if mask is None else mask[:, self.embedding.prefix :]


class BlocksTrunk(nn.Module):
    """The pooled vector and the input's own tokens of blocks, before any projection."""

    def __init__(self, encoder: BlocksModule) -> None:
        super().__init__()
        encoder.project = None
        self.blocks = encoder

    def forward(self, x: Tensor) -> LocalFeatures:
        tokens, mask = self.blocks.embedding(x)
        return self.blocks.local(self.blocks.encode(tokens, mask), mask)


def _renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The layers of a ``transformers`` ViT as blocks, with q, k and v of each side by side."""
    matches = [(match, value) for key, value in state.items() if (match := _LAYER.fullmatch(key))]
    named = {f"blocks.{layer[1]}.{_PARTS.get(layer[2], layer[2])}.{layer[3]}": value for layer, value in matches}
    # side by side: the blocks have one linear layer for the three
    for query in [key for key in named if ".q_proj." in key]:
        parts = [named.pop(query.replace(".q_proj.", f".{letter}_proj.")) for letter in "qkv"]
        named[query.replace(".q_proj.", ".qkv.")] = torch.cat(parts)
    return named


def _embedding_weights(source: Any, embedding: PatchEmbedding) -> dict[str, Tensor]:
    height, across = (side * embedding.patch for side in embedding.grid)
    conv = source.embeddings.patch_embeddings.projection
    with torch.no_grad():
        # for the view's size, which may differ from that of the pretraining
        positions = source.embeddings.interpolate_pos_encoding(embedding.positions, height, across)
    return {
        "embedding.cls": source.embeddings.cls_token,
        "embedding.positions": positions,
        "embedding.conv.weight": conv.weight,
        "embedding.conv.bias": conv.bias,
    }


def _fill(module: BlocksModule, source: Any, embedding: Embedding | None, name: str) -> None:
    """Copy a ViTModel's parameters into blocks; deeper blocks and a final norm that these lack are left out.

    Args:
        module: the blocks.
        source: the ViTModel.
        embedding: embedding of images to fill too, with positions interpolated to its grid; None: none.
        name: name of the weights.

    Raises:
        ConfigError: the ViTModel lacks a parameter of the blocks or the final norm.
    """
    norm = {f"norm.{key}": value.detach() for key, value in source.layernorm.named_parameters()}
    weights = _renamed(source.state_dict()) | norm
    if isinstance(embedding, PatchEmbedding):
        weights |= _embedding_weights(source, embedding)
    # not strict: the projection to d and other inputs' embeddings are never there
    missing = module.load_state_dict(weights, strict=False).missing_keys
    if lost := [key for key in missing if key.startswith(("blocks.", "norm."))]:
        raise ConfigError(f"weights '{name}' lack {len(lost)} weights of encoder 'blocks', such as '{lost[0]}'")
