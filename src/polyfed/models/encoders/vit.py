"""Vision transformer image encoder (Dosovitskiy et al., ICLR 2021), from ``transformers``."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoder import PretrainedEncoder, check_patches, image_shape
from polyfed.models.towers import EncoderTower, LocalFeatures


class _Preset(NamedTuple):
    width: int
    layers: int
    heads: int
    patch: int


_PRESETS = {
    "nano": _Preset(96, 4, 3, 8),
    "tiny": _Preset(192, 12, 3, 16),
    "small": _Preset(384, 12, 6, 16),
    "base": _Preset(768, 12, 12, 16),
}


class ViT(PretrainedEncoder):
    """Pre-norm ViT, its CLS token or mean patch token projected to d; with ``pie``, attention over patches.

    Pretrained position embeddings are interpolated (bicubic) once, when the model is built for another size.
    """

    view: SerializeAsAny[View] = Pixels(size=64)
    size: Literal["nano", "tiny", "small", "base"] = Field(
        default="nano", description="architecture, unless `weights` bring their own (small is ViT-S/16)"
    )
    patch: int | None = Field(default=None, ge=1, description="side of a patch in pixels, over `size`")
    pooling: Literal["cls", "mean"] = Field(default="cls", description="CLS token, or mean of the patch tokens")
    pie: bool = Field(default=False, description="attention over the patch tokens")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout within the transformer, if not pretrained")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] to [b, dim].

        Raises:
            ConfigError: the view gives no images, or of a size that patches do not divide; or the weights
                cannot be had or have another number of channels.
        """
        shape = image_shape(spec, "vit")
        trunk = self._model(shape, context)
        width = int(trunk.config.hidden_size)
        return EncoderTower(_ViTTrunk(trunk, self.pooling), width, dim, pie=width if self.pie else None)

    def _model(self, shape: tuple[int, int, int], context: DataContext) -> Any:
        from transformers import ViTConfig, ViTModel

        if self.weights:
            model = self.pretrained(ViTModel, context, shape[0], add_pooling_layer=False)
            check_patches(shape, int(model.config.patch_size), "vit")
            _resize(model, *shape[1:])
            return model
        width, layers, heads, patch = _PRESETS[self.size]
        patch = self.patch or patch
        check_patches(shape, patch, "vit")
        config = ViTConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            image_size=shape[1:],
            patch_size=patch,
            num_channels=shape[0],
            hidden_dropout_prob=self.dropout,
            layer_norm_eps=1e-6,
        )
        return ViTModel(config, add_pooling_layer=False)


class _ViTTrunk(nn.Module):
    def __init__(self, model: Any, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        tokens: Tensor = self.model(x).last_hidden_state
        # CLS is no position of the picture
        patches = tokens[:, 1:]
        return LocalFeatures(tokens[:, 0] if self.pooling == "cls" else patches.mean(1), patches)


def _resize(model: Any, height: int, width: int) -> None:
    """Give the position embeddings the grid of images of height x width pixels."""
    embeddings = model.embeddings
    patch = int(model.config.patch_size)
    count = (height // patch) * (width // patch) + 1
    with torch.no_grad():
        like = embeddings.position_embeddings.new_empty(1, count, model.config.hidden_size)
        positions = embeddings.interpolate_pos_encoding(like, height, width)
    # once, at the build: transformers would interpolate at every step
    embeddings.position_embeddings = nn.Parameter(positions.detach().clone())
    embeddings.image_size = embeddings.patch_embeddings.image_size = (height, width)
    embeddings.patch_embeddings.num_patches = count - 1
    model.config.image_size = (height, width)
