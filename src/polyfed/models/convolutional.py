"""What convolutional encoders share: how their maps are normalised."""

from __future__ import annotations

import math
from typing import Literal, Self, TypeVar

from pydantic import Field, model_validator
from torch import nn

from polyfed.models.encoder import PretrainedEncoder

_Module = TypeVar("_Module", bound=nn.Module)
_GROUPS = 32


class ConvolutionalEncoder(PretrainedEncoder):
    """Encoders whose published form has batch norms.

    Group norms (Wu and He, ECCV 2018) look at each sample by itself: DP-SGD needs that, and statistics of unlike
    clients do not mix (Hsieh et al., ICML 2020).
    """

    norm: Literal["batch", "group"] = Field(
        default="batch",
        description="of maps: by batch, or of each sample by 32 groups of channels (or the largest number below that "
        "divides both); trained from scratch only",
    )

    @model_validator(mode="after")
    def _weights_have_batch_norms(self) -> Self:
        if self.norm == "group" and self.weights:
            raise ValueError(f"norm: group: the weights {self.weights} were trained with batch norms; leave out either")
        return self

    def normed(self, model: _Module) -> _Module:
        """The model, its batch norms replaced where ``norm`` says so."""
        if self.norm == "group":
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.BatchNorm2d):
                        channels = child.num_features
                        setattr(parent, name, nn.GroupNorm(math.gcd(_GROUPS, channels), channels, eps=child.eps))
        return model
