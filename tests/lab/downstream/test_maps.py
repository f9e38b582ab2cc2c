"""Maps that decoders of masks read off a trunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext
from polyfed.lab.downstream.probe import FrozenModel
from polyfed.lab.downstream.probes.segmentation import MapReader
from polyfed.models.decoders import UNetDecoder
from polyfed.models.model import ModelSettings
from polyfed.models.towers import LocalFeatures, from_map


@pytest.mark.parametrize(
    ("encoder", "sides"),
    [
        ({"name": "resnet", "widths": [8, 12, 16], "depths": [1, 1, 1], "stem": "medium"}, (8, 16, 32)),
        ({"name": "mobilenet", "multiplier": 0.35}, (2, 4, 8, 16, 32)),  # pooling hides no map
    ],
)
def test_a_convolutional_network_gives_every_resolution(
    encoder: dict[str, object], sides: object, tmp_path: Path
) -> None:
    settings = ModelSettings.model_validate(
        {"dim": 8, "encoders": {"image": {"view": {"name": "pixels", "size": 64}, **encoder}}}
    )
    context = DataContext(tmp_path)
    trunk = FrozenModel(
        "random", settings.build({}, context), {"image": settings.encoders["image"].view}, context
    ).trunk("image")
    assert trunk is not None
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    reader = MapReader.of(trunk, x[:1], "test")
    maps = reader(x)
    assert reader.sides == tuple(value.shape[2] for value in maps) == sides
    torch.testing.assert_close(maps[0].flatten(2).transpose(1, 2), trunk(x).local)
    decoder = reader.decoder((8, 4), 64)
    assert isinstance(decoder, UNetDecoder)
    assert decoder(maps).shape == (2, 1, 64, 64)
    assert not any(module._forward_hooks for module in trunk.modules())


def test_a_last_map_that_no_module_gives_is_refused() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)

        def forward(self, x: Tensor) -> LocalFeatures:
            return from_map(self.last(self.first(x)).square())  # ends in a function, not in a module

    with pytest.raises(
        ConfigError, match=r"test: the trunk has maps of 8x8, but its 16 positions are the output of no"
    ):
        MapReader.of(Cut(), torch.randn(1, 3, 8, 8), "test")
