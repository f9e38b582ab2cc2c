"""Frozen networks whose features runs cache, as the first part of a program, which then takes raw inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.backbones import Backbone, channels_last, frozen_backbone, locate
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features, Native
from polyfed.models.model import Model
from polyfed.models.towers import Positioned, Positions
from polyfed.models.trunks import Padding


class FrozenNetwork(nn.Module):
    """What a view of features computes of inputs that are prepared as its network takes them, in float32.

    Args:
        view: it.
        backbone: its network.
        spec: of the inputs.
    """

    def __init__(self, view: Features, backbone: Backbone, spec: InputSpec) -> None:
        super().__init__()
        self.view, self.backbone, self.padding = view, backbone, Padding.for_texts(spec, backbone)
        # positions of texts are filled up to a length, on which an encoder may depend
        self.length = spec.shape[0] if spec.vocabulary and view.pool == "tokens" and not view.positions else None

    def forward(self, x: Tensor) -> Tensor:
        mask = None
        if self.padding is not None:
            x, mask = self.padding.of(x)
        features = self.view.averaged(self.backbone(x, mask), mask)
        return features if self.length is None else F.pad(features, (0, 0, 0, self.length - features.shape[1]))


class RawEncoder(nn.Module):
    """An encoder of features behind the network that gives them."""

    def __init__(self, network: nn.Module, encoder: nn.Module) -> None:
        super().__init__()
        self.network, self.encoder = network, encoder

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.encoder(self.network(x))
        return embedding

    def positions(self, x: Tensor) -> Positions:
        """Those of the encoder."""
        return cast("Positioned", self.encoder).positions(self.network(x))


def on_raw_inputs(model: Model, views: Mapping[str, View], context: DataContext) -> dict[str, View]:
    """Put networks of cached features in front of the encoders of a model, which is changed.

    Returns:
        Modality -> view that gives what the encoder takes now.

    Raises:
        ConfigError: a network cannot be had.
    """
    raw = {}
    for modality, view in views.items():
        raw[modality] = view.resolved(modality, context)
        if isinstance(view, Features):
            raw[modality], network = network_of(view, modality, context)
            model.encoders[modality] = RawEncoder(network, model.encoders[modality])
    return raw


def network_of(view: Features, modality: str, context: DataContext) -> tuple[View, FrozenNetwork]:
    """The view that gives raw inputs, and the network that makes features of them.

    Raises:
        ConfigError: the network cannot be had.
    """
    folder = locate(view.backbone, context.weights, key="view features, backbone", hub=context.hub)
    settings = {key: getattr(view, key) for key in ("backbone", "tower", "size", "fit", "length")}
    raw = Native(**settings).resolved(modality, context)
    backbone = cast("Backbone", channels_last(frozen_backbone(folder, view.pool, view.tower, view.left)))
    return raw, FrozenNetwork(view, backbone, raw.spec(modality, context))
