"""Frozen networks whose features runs cache, as the first part of a program, which then takes raw inputs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.backbones import Backbone, channels_last, frozen_backbone, locate
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features, Native
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


def with_network(view: View, modality: str, context: DataContext) -> tuple[View, nn.Module]:
    """The view that gives raw inputs, and what comes before an encoder: for features their network, else nothing.

    Raises:
        ConfigError: the network cannot be had.
    """
    if not isinstance(view, Features):
        return view.resolved(modality, context), nn.Identity()
    folder = locate(view.backbone, context.weights, key="view features, backbone", hub=context.hub)
    settings = {key: getattr(view, key) for key in ("backbone", "tower", "size", "fit", "length")}
    raw = Native(**settings).resolved(modality, context)
    backbone = channels_last(frozen_backbone(folder, view.pool, view.tower, view.left))
    assert isinstance(backbone, Backbone)
    return raw, FrozenNetwork(view, backbone, raw.spec(modality, context))
