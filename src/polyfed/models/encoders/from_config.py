"""ViT and BERT of transformers with weights of their own, and a projection of the features of a frozen backbone."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from jaxtyping import Float, Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoder import Encoder, check_patches, feature_shape, image_shape, token_length
from polyfed.models.towers import PIE, EncoderTower, LocalFeatures, masked_mean, valid_positions

# width, layers, heads and side of a patch
_VIT_SIZES = {"nano": (96, 4, 3, 8), "tiny": (192, 12, 3, 16), "small": (384, 12, 6, 16), "base": (768, 12, 12, 16)}
# width, layers and heads
_BERT_SIZES = {"tiny": (128, 2, 2), "mini": (256, 4, 4), "small": (512, 4, 8), "base": (768, 12, 12)}


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
        from transformers import ViTConfig, ViTModel

        shape = image_shape(spec, "vit")
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
        trunk = _ViTTrunk(ViTModel(config, add_pooling_layer=False), self.pooling)
        return EncoderTower(trunk, width, dim, pie=width if self.pie else None)


class _ViTTrunk(nn.Module):
    def __init__(self, model: Any, pooling: str) -> None:
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, x: Float[Tensor, "b c h w"]) -> LocalFeatures:
        tokens: Tensor = self.model(x).last_hidden_state
        # CLS is not a position of the image
        patches = tokens[:, 1:]
        return LocalFeatures(tokens[:, 0] if self.pooling == "cls" else patches.mean(1), patches)


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
        from transformers import BertConfig, BertModel

        if (length := token_length(spec, "bert")) > self.positions:
            raise ConfigError(
                f"encoder 'bert' has room for {self.positions} tokens a text, its view gives {length}; shorten its view"
            )
        width, layers, heads = _BERT_SIZES[self.size]
        config = BertConfig(
            vocab_size=len(spec.vocabulary),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=self.positions,
            pad_token_id=spec.pad,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )
        model = BertModel(config, add_pooling_layer=self.pooling == "pooler")
        return EncoderTower(_BertTrunk(model, spec.pad, self.pooling), width, dim, pie=width if self.pie else None)


class _BertTrunk(nn.Module):
    def __init__(self, model: Any, pad: int, pooling: str) -> None:
        super().__init__()
        self.model, self.pad, self.pooling = model, pad, pooling

    def forward(self, tokens: Int64[Tensor, "b l"]) -> LocalFeatures:
        mask = valid_positions(tokens, self.pad)
        attended = mask.clone()
        attended[:, 0] = True  # an empty text is read as one padding token
        # [b, 1, l, l]: transformers takes it unchanged, where [b, l] would cost a device sync
        attended = attended[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        output = self.model(input_ids=tokens, attention_mask=attended)
        states: Tensor = output.last_hidden_state
        if self.pooling == "pooler":
            return LocalFeatures(output.pooler_output, states, mask)
        # the pooler is a layer on CLS, so that CLS itself is still a position
        led = self.pooling == "cls"
        return LocalFeatures(states[:, 0] if led else masked_mean(states, mask), states, mask, led)


class FeatureProjection(Encoder):
    """Features [b, f], standardised or not, dropout, a linear layer or an MLP with one hidden layer to d.

    Features by position [b, l, f] are averaged over their positions, and with ``pie`` attended to as well;
    positions that are all zero are padding.
    """

    short_name: ClassVar[str] = "projection"

    view: SerializeAsAny[View] = Features()
    standardise: Literal["none", "batch", "layer"] = Field(
        default="layer", description="by sample (layer) or by feature over batches, both without affine; or none"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the features dropped in training")
    hidden: int | None = Field(default=None, ge=1, description="width of a hidden layer (GELU); none by default")
    pie: bool = Field(default=False, description="attention over positions (PVSE); needs features by position")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps features [b, f] or [b, l, f] to [b, dim].

        Raises:
            ConfigError: the view gives no features, or ``pie`` has no positions to attend to.
        """
        return _ProjectionModule(self, feature_shape(spec, "projection", positions=self.pie)[-1], dim)


class _ProjectionModule(nn.Module):
    def __init__(self, settings: FeatureProjection, width: int, dim: int) -> None:
        super().__init__()
        inner: list[nn.Module] = []
        if settings.hidden is not None:
            inner = [nn.Linear(width, settings.hidden), nn.GELU(), nn.Dropout(settings.dropout)]
        batch, layer = _FeatureNorm(width, affine=False), nn.LayerNorm(width, elementwise_affine=False)
        norms: dict[str, nn.Module] = {"batch": batch, "layer": layer, "none": nn.Identity()}
        self.standardise = norms[settings.standardise]
        self.project = nn.Sequential(nn.Dropout(settings.dropout), *inner, nn.Linear(settings.hidden or width, dim))
        self.pie = PIE(width, dim) if settings.pie else None

    def forward(self, x: Float[Tensor, "b ... f"]) -> Float[Tensor, "b d"]:
        mask = (x != 0).any(-1) if x.dim() == 3 else None
        out: Tensor = self.project(self.standardise(x if mask is None else masked_mean(x, mask)))
        return out if self.pie is None else self.pie(out, x, mask)


class _FeatureNorm(nn.BatchNorm1d):
    """Batch normalisation; a training batch of one sample uses the running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if input.shape[0] > 1:
            return super().forward(input)
        return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)
