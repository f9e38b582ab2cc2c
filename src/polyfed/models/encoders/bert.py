"""BERT text encoder (Devlin et al., NAACL 2019), from ``transformers``."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from jaxtyping import Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoder import Encoder, token_length
from polyfed.models.pooling import masked_mean, valid_positions
from polyfed.models.towers import EncoderTower, LocalFeatures


class _Preset(NamedTuple):
    width: int
    layers: int
    heads: int


_PRESETS = {
    "tiny": _Preset(128, 2, 2),
    "mini": _Preset(256, 4, 4),
    "small": _Preset(512, 4, 8),
    "base": _Preset(768, 12, 12),
}


class Bert(Encoder):
    """BERT from scratch; its CLS token, the mean of its tokens, or its pooler (a tanh layer on CLS) projected to d."""

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
        width = _PRESETS[self.size].width
        return EncoderTower(trunk, width, dim, pie=width if self.pie else None)

    def _model(self, words: int, pad: int) -> Any:
        from transformers import BertConfig, BertModel

        width, layers, heads = _PRESETS[self.size]
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
