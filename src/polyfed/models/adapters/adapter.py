"""Adapters, a few trained parameters beside a frozen pretrained network, and those behind it, on its pooled vector."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from polyfed.core.settings import Settings
from polyfed.data.backbones import BackboneTower
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.trunks import NetworkTrunk


class Adapter(Settings):
    """What is trained of a pretrained network besides the layer behind it.

    Subclasses live in ``polyfed.models.adapters``. They act within the network, by ``attach``, or behind it.
    """

    home: ClassVar[str] = "polyfed.models.adapters"

    @property
    def positions(self) -> int:
        """By how many positions it makes the network's input longer."""
        return 0

    @abstractmethod
    def attach(
        self, trunk: NetworkTrunk, tower: BackboneTower, spec: InputSpec, folder: Path, context: DataContext
    ) -> None:
        """Put trained parameters into the network; their values are drawn from torch's global generator, or read.

        Args:
            trunk: the network, frozen.
            tower: which of several it is.
            spec: its input.
            folder: its weights.
            context: where else files are.

        Raises:
            ConfigError: the network has no place for them, or what they start from cannot be had.
        """


class FeatureAdapter(Adapter):
    """Behind the network, on its pooled vector: the network itself is computed once and cached."""

    def attach(
        self, trunk: NetworkTrunk, tower: BackboneTower, spec: InputSpec, folder: Path, context: DataContext
    ) -> None:
        """Nothing is put into the network."""

    @abstractmethod
    def behind(self, width: int) -> nn.Module:
        """A module on pooled vectors [b, width], which gives vectors of that width."""


class Bottleneck(FeatureAdapter):
    """CLIP-Adapter (Gao et al., IJCV 2024, Equations 5 to 7): ratio * A(v) + (1 - ratio) * v on pooled features v.

    A(v) = relu(relu(v W1) W2) with ``reduction`` times fewer features inside.

    >>> adapter = Bottleneck(reduction=4, ratio=0.2).behind(width=8)
    >>> adapter.down.out_features, adapter(torch.zeros(2, 8)).shape
    (2, torch.Size([2, 8]))
    """

    short_name: ClassVar[str] = "bottleneck"

    reduction: int = Field(default=4, ge=1, description="features over those of the hidden layer")
    ratio: float = Field(default=0.2, gt=0, le=1, description="share of what is learnt")

    def behind(self, width: int) -> nn.Module:
        return _Bottleneck(width, max(1, width // self.reduction), self.ratio)


class _Bottleneck(nn.Module):
    def __init__(self, width: int, hidden: int, ratio: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.ratio = ratio

    def forward(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        learnt = torch.relu(self.up(torch.relu(self.down(x))))
        return self.ratio * learnt + (1 - self.ratio) * x


class FeatureAttention(FeatureAdapter):
    """FedCLIP's adapter (Lu et al., IEEE Data Engineering Bulletin 2023, section 3): softmax(W2 tanh(W1 v)) * v.

    A weight for each feature, both layers of as many features as v; biases are learnt too.

    >>> FeatureAttention().behind(width=8)(torch.ones(2, 8)).sum(1).round(decimals=3).tolist()
    [1.0, 1.0]
    """

    short_name: ClassVar[str] = "attention"

    def behind(self, width: int) -> nn.Module:
        return AttentionModule(width)


class AttentionModule(nn.Module):
    """softmax(W2 tanh(W1 v)) * v."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        weights: Tensor = self.second(torch.tanh(self.first(x))).softmax(-1)
        return weights * x
