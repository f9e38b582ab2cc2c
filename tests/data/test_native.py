"""What a pretrained network takes, against its own processor and tokenizer."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers as hf
from PIL import Image

from item_tables import noise, struct_of
from polyfed.core.errors import ConfigError
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.features import Native
from tiny_networks import PREPROCESSOR, ROOM, save

WORDS = ["w1 w2 w3", "w4", "w5 unheard w6 w7 w8", "", " ".join(f"w{number}" for number in range(20))]


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    for name in ("vit", "bert", "clip", "roberta"):
        save(name, tmp_path / "weights")
    return DataContext(tmp_path / "cache", tmp_path / "weights")


def opened(view: Native, values: list[Any], context: DataContext) -> torch.Tensor:
    column = Column(pa.chunked_array([values]), f"{len(values)} values", "here")
    return view.open(column, "m", context)(torch.arange(len(values)))


@pytest.mark.parametrize(
    ("changes", "side"),
    [
        ({}, 40),
        ({"resample": 2, "do_normalize": False}, 40),
        ({"do_rescale": False}, 40),
        ({"rescale_factor": 1 / 127.5, "size": {"height": 24, "width": 24}}, 40),
        ({"do_center_crop": True, "crop_size": {"height": 24, "width": 24}, "size": {"shortest_edge": 24}}, 28),
    ],
)
def test_pixels_are_those_of_the_folders_own_processor(
    changes: dict[str, Any], side: int, context: DataContext
) -> None:
    kind = hf.CLIPImageProcessorPil if "do_center_crop" in changes else hf.ViTImageProcessorPil
    content = PREPROCESSOR | changes
    (context.weights / "vit" / "preprocessor_config.json").write_text(json.dumps(content))
    pictures = [struct_of(noise(seed, side, 28), f"{seed}.png") for seed in range(3)]
    found = opened(Native(backbone="vit"), pictures, context)
    images = [Image.open(io.BytesIO(picture["bytes"])) for picture in pictures]
    expected = kind(**content)(images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, expected.float(), atol=1e-4, rtol=1e-4)
    assert found.std() > 0.1


@pytest.mark.parametrize(("backbone", "tower"), [("bert", "whole"), ("clip", "text")])
def test_ids_are_those_of_the_folders_own_tokenizer(backbone: str, tower: Any, context: DataContext) -> None:
    view = Native(backbone=backbone, tower=tower, length=ROOM)
    own = hf.AutoTokenizer.from_pretrained(context.weights / backbone)
    expected = own(WORDS, padding=True, truncation=True, max_length=ROOM, return_tensors="pt")["input_ids"]
    found = opened(view, WORDS, context)
    assert torch.equal(found, expected[:, : found.shape[1]])
    assert (expected[:, found.shape[1] :] == own.pad_token_id).all()
    spec = view.spec("m", context)
    assert (spec.shape, spec.pad, len(spec.vocabulary)) == ((ROOM,), own.pad_token_id, len(own))


def test_settings_of_ones_own_go_before_those_of_the_folder(context: DataContext) -> None:
    assert Native(backbone="vit", size=24).spec("m", context).shape == (3, 24, 24)
    assert Native(backbone="vit", fit="crop").resolved("image", context).fit == "crop"
    assert Native(backbone="roberta").spec("m", context).shape == (ROOM,)  # positions of 13 begin behind padding
    assert Native(backbone="bert", length=5).spec("m", context).shape == (5,)
    assert Native(backbone="clip", tower="vision").spec("m", context).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("backbone", "file", "message"),
    [
        ("nowhere", None, "view native, backbone: no folder 'nowhere'"),
        ("vit", "preprocessor_config.json", "holds no preprocessor_config.json"),
        ("bert", "tokenizer*.json", "holds no tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(backbone: str, file: str | None, message: str, context: DataContext) -> None:
    for path in (context.weights / backbone).glob(file) if file else ():
        path.unlink()
    with pytest.raises(ConfigError, match=message):
        Native(backbone=backbone).spec("m", replace(context, fitted={}))
