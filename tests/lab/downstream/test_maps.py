from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.data.view import DataContext
from polyfed.lab.downstream.probe import FrozenModel
from polyfed.lab.downstream.probes.segmentation import MapReader
from polyfed.models.decoders import GridDecoder, UNetDecoder
from polyfed.models.model import ModelSettings
from polyfed.models.towers import LocalFeatures, from_map

PIXELS = {"name": "pixels", "size": 32}


def subject(encoder: Mapping[str, Any], folder: Path, **more: Any) -> FrozenModel:
    settings = ModelSettings.model_validate({"dim": 8, "encoders": {"image": {"view": PIXELS, **encoder}}, **more})
    context = DataContext(folder)
    with isolated(0, "maps"):
        model = settings.build({}, context)
    return FrozenModel("random", model, {"image": settings.encoders["image"].view}, context)


def reader_of(which: FrozenModel, x: Tensor) -> MapReader:
    trunk = which.trunk("image")
    assert trunk is not None
    return MapReader.of(trunk, x[:1], "test")


def pictures() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("aligned", [False, True])
def test_a_resnet_gives_every_resolution(tmp_path: Path, aligned: bool) -> None:
    more = {"aligner": {"layers": 1, "heads": 2, "head": "linear"}} if aligned else {}
    which = subject({"name": "resnet", "widths": [8, 12, 16], "depths": [1, 1, 1], "stem": "medium"}, tmp_path, **more)
    x = pictures()
    reader = reader_of(which, x)
    assert (reader.channels, reader.sides) == ((16, 12, 8), (4, 8, 16))
    maps = reader(x)
    assert [tuple(value.shape) for value in maps] == [(3, 16, 4, 4), (3, 12, 8, 8), (3, 8, 16, 16)]
    local: LocalFeatures = reader.trunk(x)
    torch.testing.assert_close(maps[0].mean((2, 3)), local.pooled)
    assert isinstance(reader.decoder((8, 4), 32), UNetDecoder)


@pytest.mark.parametrize(("side", "sides"), [(64, (2, 4, 8, 16, 32)), (96, (3, 6, 12, 24, 48))])
def test_pooling_hides_no_map_of_a_mobilenet(tmp_path: Path, side: int, sides: tuple[int, ...]) -> None:
    view = {"name": "pixels", "size": side}
    which = subject({"name": "mobilenet", "multiplier": 0.35, "view": view}, tmp_path)
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    reader = reader_of(which, x)
    assert reader.sides == sides
    maps = reader(x)
    torch.testing.assert_close(maps[0].flatten(2).transpose(1, 2), reader.trunk(x).local)
    decoder = reader.decoder((8, 4), side)
    assert isinstance(decoder, UNetDecoder)
    assert decoder(maps).shape == (2, 1, side, side)


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


@pytest.mark.parametrize("encoder", [{"name": "blocks", "depth": 1, "patch": 8}, {"name": "vit", "patch": 8}])
def test_a_transformer_gives_its_grid(tmp_path: Path, encoder: dict[str, Any]) -> None:
    which = subject(encoder, tmp_path)
    x = pictures()
    reader = reader_of(which, x)
    assert (reader.modules, reader.channels, reader.sides) == ((), (96,), (4,))
    (grid,) = reader(x)
    local: LocalFeatures = reader.trunk(x)
    torch.testing.assert_close(grid[1, :, 2, 3], local.local[1, 2 * 4 + 3])
    assert isinstance(reader.decoder((8, 4), 32), GridDecoder)


def test_reading_leaves_no_hooks_and_changes_nothing(tmp_path: Path) -> None:
    which = subject({"name": "resnet", "widths": [8, 12], "depths": [1, 1]}, tmp_path)
    before = {name: value.clone() for name, value in which.model.state_dict().items()}
    reader = reader_of(which, pictures())
    reader(pictures())
    assert not any(module._forward_hooks for module in reader.trunk.modules())
    assert all(torch.equal(before[name], value) for name, value in which.model.state_dict().items())
    assert which.model.embed("image", pictures()).shape == (3, 8)  # its projection is still there


def test_words_are_no_grid() -> None:
    class Words(nn.Module):
        def forward(self, x: Tensor) -> LocalFeatures:
            return LocalFeatures(x.mean(1), x)

    with pytest.raises(ConfigError, match="6 positions are no square grid"):
        MapReader.of(Words(), torch.zeros(1, 6, 4), "test")
