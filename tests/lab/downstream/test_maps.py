"""Maps that decoders of masks read off a trunk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyfed.data.view import DataContext
from polyfed.lab.downstream.probe import FrozenModel
from polyfed.lab.downstream.probes.segmentation import MapReader
from polyfed.models.decoders import UNetDecoder
from polyfed.models.model import ModelSettings


@pytest.mark.parametrize(
    ("encoder", "sides"),
    [
        ({"name": "resnet", "widths": [8, 12, 16], "depths": [1, 1, 1], "stem": "medium"}, (8, 16, 32)),
    ],
)
def test_a_convolutional_network_gives_every_resolution(
    encoder: dict[str, object], sides: object, tmp_path: Path
) -> None:
    image = {"view": {"name": "pixels", "size": 64}, **encoder}
    settings = ModelSettings.model_validate({"dim": 8, "encoders": {"image": image}})
    context = DataContext(tmp_path)
    frozen = FrozenModel("random", settings.build({}, context), {"image": settings.encoders["image"].view}, context)
    trunk = frozen.trunk("image")
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
