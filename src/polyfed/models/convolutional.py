"""What convolutional encoders share: how their maps are normalised."""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeVar

from pydantic import Field
from torch import nn

_Module = TypeVar("_Module", bound=nn.Module)
_GROUPS = 32

MapNorm = Annotated[
    Literal["batch", "group"],
    Field(
        description="of maps: by batch, or of each sample by 32 groups of channels (or the largest number below that "
        "divides both); trained from scratch only"
    ),
]
"""Published forms have batch norms. Group norms (Wu and He, ECCV 2018) look at each sample by itself: DP-SGD needs it,
and statistics of unlike clients do not mix (Hsieh et al., ICML 2020)."""


def require_own_norm(norm: MapNorm, weights: str | None) -> None:
    """Raise ValueError if pretrained weights, which have batch norms, are to be used with other ones."""
    if norm == "group" and weights:
        raise ValueError(f"norm: group: the weights {weights} were trained with batch norms; leave out either")


def normed(model: _Module, norm: MapNorm) -> _Module:
    """The model, its batch norms replaced where ``norm`` says so."""
    if norm == "group":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.BatchNorm2d):
                    channels = child.num_features
                    setattr(parent, name, nn.GroupNorm(math.gcd(_GROUPS, channels), channels, eps=child.eps))
    return model
