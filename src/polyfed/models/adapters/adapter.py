"""Adapters, a few trained parameters beside a frozen pretrained network, and those behind it, on its pooled vector."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
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
