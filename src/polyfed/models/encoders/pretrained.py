"""Any pretrained network of ``transformers``, trained further or frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import Backbone, BackboneTower, digest, load_backbone, locate, most_tokens, outline, pooled
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.models.encoder import Encoder, check_channels, image_shape, token_length
from polyfed.models.frozen import Frozen
from polyfed.models.pooling import valid_positions
from polyfed.models.towers import EncoderTower, LocalFeatures


class PretrainedNetwork(Encoder):
    """A network of images or of texts that ``AutoModel`` knows, with its own pooling, projected to d.

    Texts need its own tokenizer: ``view: {name: tokens, tokenizer: {name: pretrained, path: FOLDER}}``. What is frozen
    is neither trained, exchanged nor saved with clients, and all models of a process share it.
    """

    view: SerializeAsAny[View] = Field(description="pixels, or tokens of the network's own tokenizer")
    weights: str = Field(min_length=1, description="folder below data.weights_dir, or hub name owner/name")
    tower: BackboneTower = Field(default="whole", description="vision or text, of networks with both (CLIP)")
    pooling: Literal["auto", "cls", "mean", "pooled"] = Field(
        default="auto",
        description="cls, mean (of all positions) or pooled (its own pooler); auto: cls for transformers, mean for "
        "convolutional networks",
    )
    freeze: bool = Field(default=False, description="train the projection alone")
    pie: bool = Field(default=False, description="attention over the positions (PVSE)")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, c, h, w] or token ids [b, l] to [b, dim].

        Raises:
            ConfigError: the weights cannot be had, or do not fit what the view gives.
        """
        folder, pad = self._folder(context), spec.pad if spec.vocabulary else None
        width, local = self._require_fitting(folder, spec, pad)
        trunk: nn.Module
        if self.freeze:
            key = f"frozen backbone {self.frozen('', context)}"
            if key not in context.fitted:  # one for all models of this process
                made = _Trunk(load_backbone(folder, self.pooling, self.tower), pad)
                context.fitted[key] = Frozen(made, self.frozen("", context))
            trunk = copy.deepcopy(cast("Frozen", context.fitted[key]))
        else:
            trunk = _Trunk(load_backbone(folder, self.pooling, self.tower), pad)
        return EncoderTower(trunk, width, dim, pie=local if self.pie else None)

    def frozen(self, modality: str, context: DataContext) -> str:
        if not self.freeze:
            return ""
        folder = self._folder(context)
        size = sum(value.numel() for value in outline(folder, self.pooling, self.tower).parameters())
        return f"{size}x{digest(folder)[:8]}"

    def _folder(self, context: DataContext) -> Path:
        return locate(self.weights, context.weights, key="encoder pretrained, weights")

    def _require_fitting(self, folder: Path, spec: InputSpec, pad: int | None) -> tuple[int, int]:
        """Widths of the network's vectors and positions."""
        backbone = outline(folder, self.pooling, self.tower)
        config: Any = backbone.body.config
        reads_images = backbone.reads == "pixel_values"
        if reads_images:
            needed = getattr(config, "num_channels", spec.shape[0])
            check_channels(image_shape(spec, "pretrained")[0], needed, "pretrained", self.weights)
        else:
            self._require_room(token_length(spec, "pretrained"), most_tokens(folder), "tokens a text")
            self._require_room(len(spec.vocabulary), config.vocab_size, "words in the vocabulary")
        blank = torch.zeros(1, *spec.shape, dtype=torch.float32 if reads_images else torch.int64, device="meta")
        try:
            output = _Trunk(backbone, pad).backbone.output(blank)
        except (ValueError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"encoder 'pretrained': '{self.weights}' does not take what its view gives: {reason}"
            ) from error
        return pooled(output, self.pooling).shape[1], pooled(output, "tokens").shape[2]

    def _require_room(self, given: int, room: int | None, what: str) -> None:
        if room is not None and given > room:
            raise ConfigError(
                f"encoder 'pretrained': '{self.weights}' has room for {room} {what}, its view gives {given}; shorten "
                "the view's length, or give it the tokenizer of these weights"
            )


class _Trunk(nn.Module):
    """A backbone, and which of its input is padding (``pad``; None: nothing is)."""

    def __init__(self, backbone: Backbone, pad: int | None) -> None:
        super().__init__()
        self.backbone, self.pad = backbone, pad
        pooler = getattr(backbone.body, "pooler", None)
        if backbone.pool != "pooled" and pooler is not None and any(True for _ in pooler.parameters()):
            backbone.body.register_module("pooler", None)  # it would learn nothing, and many checkpoints lack it

    def forward(self, x: Tensor) -> LocalFeatures:
        mask = attended = None if self.pad is None else valid_positions(x, self.pad)
        if mask is not None:
            attended = mask.clone()
            attended[:, 0] = True  # an empty text is read as one padding token
        output, pool = self.backbone.output(x, attended), self.backbone.pool
        led = output.last_hidden_state.dim() == 3 and pool in ("auto", "cls")
        return LocalFeatures(pooled(output, pool, attended), pooled(output, "tokens", attended), mask, led)
