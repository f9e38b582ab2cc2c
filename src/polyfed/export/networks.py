"""Frozen networks whose features runs cache, in front of the encoders of these: programs then take raw inputs."""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)


class RawEncoder(nn.Module):
    """An encoder of features behind the network that gives them, in float32.

    Args:
        view: of the features.
        backbone: the network.
        encoder: of the features.
        spec: of inputs that are prepared as the network takes them.
    """

    def __init__(self, view: Features, backbone: Backbone, encoder: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.view, self.backbone, self.encoder = view, backbone, encoder
        self.padding = Padding.for_texts(spec, backbone)
        # positions of texts are filled up to a length, on which the encoder may depend
        self.length = spec.shape[0] if spec.vocabulary and view.pool == "tokens" and not view.positions else None

    def features(self, x: Tensor) -> Tensor:
        """What the view gives."""
        x, mask = (x, None) if self.padding is None else self.padding.of(x)
        features = self.view.averaged(self.backbone(x, mask), mask)
        return features if self.length is None else F.pad(features, (0, 0, 0, self.length - features.shape[1]))

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.encoder(self.features(x))
        return embedding

    def positions(self, x: Tensor) -> Positions:
        """Those of the encoder."""
        return cast("Positioned", self.encoder).positions(self.features(x))


def on_raw_inputs(model: Model, views: Mapping[str, View], context: DataContext) -> dict[str, View]:
    """Put networks of cached features in front of the encoders of a model, which is changed.

    Returns:
        Modality -> view that gives what the encoder takes now.

    Raises:
        ConfigError: a network cannot be had.
    """
    raw = {}
    for modality, view in views.items():
        if not isinstance(view, Features):
            raw[modality] = view.resolved(modality, context)
            continue
        folder = locate(view.backbone, context.weights, key="view features, backbone", hub=context.hub)
        settings = {key: getattr(view, key) for key in ("backbone", "tower", "size", "fit", "length")}
        raw[modality] = own = Native(**settings).resolved(modality, context)
        backbone = cast("Backbone", channels_last(frozen_backbone(folder, view.pool, view.tower, view.left)))
        spec = own.spec(modality, context)
        if view.precision != "fp32":
            log.warning("features of '%s' were computed in %s, the export's are in float32", modality, view.precision)
        model.encoders[modality] = RawEncoder(view, backbone, model.encoders[modality], spec)
    return raw
