from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from polyfed.core.errors import ConfigError
from polyfed.data.view import DataContext, InputSpec
from polyfed.lab.analysis.depth import chosen_tensors, depth_of
from polyfed.models.aligner import AlignerSettings
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.encoders.from_config import Bert, MobileNet, ViT
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.words import GRU, Bag
from polyfed.models.model import Model

PICTURES, WORDS = InputSpec((3, 32, 32)), InputSpec((16,), ("", "one", "two", "three"))
SMALL = ResNet(widths=(8, 8, 8), depths=(1, 2, 1), block="basic")


def model(aligner: AlignerSettings | None = None, **encoders: Any) -> Model:
    context = DataContext(Path("nowhere"))
    specs = {name: WORDS if type(each) in (Bag, Bert, GRU) else PICTURES for name, each in encoders.items()}
    built = {name: each.build(8, specs[name], context) for name, each in encoders.items()}
    if aligner is not None:
        built = {name: aligner.around(each, name, 8) for name, each in built.items()}
    return Model(built, {"labels": nn.Linear(8, 3)}, 8, final_norm=nn.LayerNorm(8))


@pytest.mark.parametrize(
    ("encoder", "count", "before", "first", "last", "behind"),
    [
        (SMALL, 3, "trunk.embedder.", "trunk.encoder.stages.0.", "trunk.encoder.stages.2.", "project."),
        (ResNet(widths=(8, 8), depths=(1, 1), pie=True), 2, "trunk.embedder.", "trunk.", "trunk.", "pie."),
        (ViT(), 4, "trunk.model.embeddings.", "trunk.model.layers.0.", "trunk.model.layers.3.", "project."),
        (Bert(), 2, "trunk.model.embeddings.", "trunk.model.encoder.layer.0.", "trunk.model.encoder.", "project."),
        (MobileNet(multiplier=0.35), 16, "trunk.model.conv_stem.", "trunk.model.layer.0.", "trunk.", "project."),
        (Blocks(depth=3), 3, "embedding.", "blocks.0.", "blocks.2.", "norm."),
    ],
)  # fmt: skip
def test_layers_of_every_encoder(encoder: Any, count: int, before: str, first: str, last: str, behind: str) -> None:
    found = depth_of(model(sound=encoder))
    assert found.counts == {"sound": count}
    for part, number in ((before, 0), (first, 1), (last, count), (behind, count + 1)):
        layers = {layer for name, layer in found.layer.items() if name.startswith(f"encoders.sound.{part}")}
        assert number in layers
    assert {layer for name, layer in found.layer.items() if name.startswith("encoders.sound.")} == {*range(count + 2)}
    assert all(layer == count + 1 for name, layer in found.layer.items() if not name.startswith("encoders."))
    assert any(name.startswith("heads.labels.") for name in found.layer)


@pytest.mark.parametrize("encoder", [SMALL, Blocks(depth=3)])
def test_an_aligner_is_deep(encoder: Any) -> None:
    built = model(AlignerSettings(layers=2, hidden=8), sound=encoder)
    found = depth_of(built)
    assert found.counts == {"sound": 3}
    aligners = {layer for name, layer in found.layer.items() if name.startswith("encoders.sound.aligner.")}
    assert aligners == {4}
    assert not any(".aligner." in name for name in chosen_tensors(built, "shallow", 3))


def test_shallow_and_deep_are_the_whole_and_share_nothing() -> None:
    built = model(sound=SMALL, words=Bert(size="mini"))
    every = set(built.state_dict())
    assert chosen_tensors(built, "all") == every
    for depth in (None, 0, 1, 3, {"words": 4}):
        shallow, deep = chosen_tensors(built, "shallow", depth), chosen_tensors(built, "deep", depth)
        assert shallow | deep == every
        assert not shallow & deep


def test_depth_by_modality_and_half_by_default() -> None:
    built = model(sound=SMALL, words=Bert(size="mini"))
    layer = depth_of(built).layer

    def deepest(depth: Any) -> list[int]:
        names = chosen_tensors(built, "shallow", depth)
        return [max(layer[name] for name in names if f".{modality}." in name) for modality in ("sound", "words")]

    assert deepest(None) == [1, 2]
    assert deepest(3) == [3, 3]
    assert deepest({"words": 4}) == [1, 4]
    assert deepest(0) == [0, 0]


@pytest.mark.parametrize("encoder", [Bag(width=8), GRU(width=8)])
def test_encoders_without_layers(encoder: Any) -> None:
    with pytest.raises(ConfigError, match=r"the encoder of 'words' \(_\w+\) has no layers to tell shallow from deep"):
        chosen_tensors(model(words=encoder), "deep")
    assert chosen_tensors(model(words=encoder), "all")


@pytest.mark.parametrize(
    ("part", "depth", "message"),
    [
        ("middle", None, r"--layers middle; valid: all, deep, shallow"),
        ("all", 2, "--depth has no effect with --layers all"),
        ("deep", 4, r"--depth 4: the encoder of 'sound' has 3 layers"),
        ("deep", -1, r"--depth -1: the encoder of 'sound' has 3 layers"),
        ("shallow", {"sund": 1}, r"--depth names 'sund', which the model does not encode; did you mean 'sound'\?"),
    ],
)
def test_what_cannot_be(part: str, depth: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_tensors(model(sound=SMALL), part, depth)
