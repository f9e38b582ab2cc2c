"""Encoders from configurations of transformers, with weights of their own: MobileNetV2, ViT and BERT."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from jaxtyping import Float, Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens
from polyfed.models.convolutional import MapNorm, normed
from polyfed.models.encoder import Encoder, check_patches, image_shape, token_length
from polyfed.models.towers import EncoderTower, LocalFeatures, from_map, masked_mean, valid_positions


class MobileNet(Encoder):
    """MobileNetV2 from scratch, its mean-pooled map projected to d; with ``pie``, attention over the map too.

    Batch normalisation forgets at PyTorch's usual rate (momentum 0.1): ``transformers`` ships TensorFlow's
    0.997, which PyTorch reads the other way round, so that the running statistics would be those of the last
    batch.
    """

    short_name: ClassVar[str] = "mobilenet"

    projecting = ("pie", "dropout")

    norm: MapNorm = "batch"
    view: SerializeAsAny[View] = Pixels(size=96)
    multiplier: float = Field(default=1.0, ge=0.1, le=2, description="factor on all widths")
    pie: bool = Field(default=False, description="attention over the map (PVSE, CreamFL)")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the pooled vector dropped in training")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] to [b, dim]; sides of 32 pixels or more make sense.

        Raises:
            ConfigError: the view gives no images.
        """
        from transformers import MobileNetV2Config, MobileNetV2Model

        channels, _, _ = image_shape(spec, "mobilenet")
        config = MobileNetV2Config(num_channels=channels, depth_multiplier=self.multiplier)
        model = normed(MobileNetV2Model(config), self.norm)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                # PyTorch's usual rate, see the class
                module.momentum = 0.1
        width = int(model.conv_1x1.convolution.out_channels)
        return EncoderTower(_MobileNetTrunk(model), width, dim, pie=width if self.pie else None, dropout=self.dropout)


class _MobileNetTrunk(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        return from_map(self.model(x).last_hidden_state)


class _ViTSize(NamedTuple):
    width: int
    layers: int
    heads: int
    patch: int


_VIT_SIZES = {
    "nano": _ViTSize(96, 4, 3, 8),
    "tiny": _ViTSize(192, 12, 3, 16),
    "small": _ViTSize(384, 12, 6, 16),
    "base": _ViTSize(768, 12, 12, 16),
}


class ViT(Encoder):
    """Pre-norm ViT from scratch, its CLS or mean patch token projected to d; with ``pie``, attention over patches."""

    short_name: ClassVar[str] = "vit"

    view: SerializeAsAny[View] = Pixels(size=64)
    size: Literal["nano", "tiny", "small", "base"] = Field(default="nano", description="architecture (small: ViT-S/16)")
    patch: int | None = Field(default=None, ge=1, description="side of a patch in pixels, over `size`")
    pooling: Literal["cls", "mean"] = Field(default="cls", description="CLS token, or mean of the patch tokens")
    pie: bool = Field(default=False, description="attention over the patch tokens")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout within the transformer")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] to [b, dim].

        Raises:
            ConfigError: the view gives no images, or of a size that patches do not divide.
        """
        trunk = self._model(image_shape(spec, "vit"))
        width = int(trunk.config.hidden_size)
        return EncoderTower(_ViTTrunk(trunk, self.pooling), width, dim, pie=width if self.pie else None)

    def _model(self, shape: tuple[int, int, int]) -> Any:
        from transformers import ViTConfig, ViTModel

        width, layers, heads, patch = _VIT_SIZES[self.size]
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


class _BertSize(NamedTuple):
    width: int
    layers: int
    heads: int


_BERT_SIZES = {
    "tiny": _BertSize(128, 2, 2),
    "mini": _BertSize(256, 4, 4),
    "small": _BertSize(512, 4, 8),
    "base": _BertSize(768, 12, 12),
}


class Bert(Encoder):
    """BERT from scratch; its CLS token, the mean of its tokens, or its pooler (a tanh layer on CLS) projected to d."""

    short_name: ClassVar[str] = "bert"

    view: SerializeAsAny[View] = Tokens()
    size: Literal["tiny", "mini", "small", "base"] = Field(default="tiny", description="architecture")
    pooling: Literal["cls", "mean", "pooler"] = Field(default="cls", description="which tokens make the embedding")
    positions: int = Field(default=512, ge=1, description="longest text")
    dropout: float = Field(default=0.1, ge=0, lt=1, description="dropout within the transformer")
    pie: bool = Field(default=False, description="attention over the tokens (PVSE)")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps token ids [b, l] to [b, dim].

        Raises:
            ConfigError: the view gives no tokens, or longer texts than the model has room for.
        """
        if (length := token_length(spec, "bert")) > self.positions:
            raise ConfigError(
                f"encoder 'bert' has room for {self.positions} tokens a text, its view gives {length}; set the view's "
                f"length to {self.positions} or less"
            )
        trunk = _BertTrunk(self._model(len(spec.vocabulary), spec.pad), spec.pad, self.pooling)
        width = _BERT_SIZES[self.size].width
        return EncoderTower(trunk, width, dim, pie=width if self.pie else None)

    def _model(self, words: int, pad: int) -> Any:
        from transformers import BertConfig, BertModel

        width, layers, heads = _BERT_SIZES[self.size]
        config = BertConfig(
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=self.positions,
            pad_token_id=pad,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )
        return BertModel(config, add_pooling_layer=self.pooling == "pooler")


class _BertTrunk(nn.Module):
    def __init__(self, model: Any, pad: int, pooling: str) -> None:
        super().__init__()
        self.model = model
        self.pad = pad
        self.pooling = pooling

    def forward(self, tokens: Int64[Tensor, "b l"]) -> LocalFeatures:
        mask = valid_positions(tokens, self.pad)
        attended = mask.clone()
        attended[:, 0] = True  # an empty text is read as one padding token
        # [b, 1, l, l]: transformers takes it as it is, where [b, l] would cost a device sync
        attended = attended[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        output = self.model(input_ids=tokens, attention_mask=attended)
        states: Tensor = output.last_hidden_state
        if self.pooling == "pooler":
            return LocalFeatures(output.pooler_output, states, mask)
        # the pooler is a layer on CLS, so that CLS itself is still a position
        led = self.pooling == "cls"
        return LocalFeatures(states[:, 0] if led else masked_mean(states, mask), states, mask, led)
