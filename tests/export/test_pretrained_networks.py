"""Models of pretrained networks without polyfed: their own processor's pixels, their own tokenizer's ids."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from item_tables import noise
from polyfed import Experiment, load_model, run
from polyfed.export.model import export_model
from tiny_networks import ROOM, save

TEXTS = ["w1 w2", "w3 unheard w4 w5 w6", "", " ".join(f"w{number}" for number in range(20))]
CASES = {
    "layers": (
        {"weights": "vit", "adapter": "lora"},
        {"weights": "bert", "trainable": 1, "pooling": "mean", "view": {"name": "native", "length": ROOM}},
    ),
    "clip": (
        {"weights": "clip", "tower": "vision", "trainable": 1, "view": "native"},
        {"weights": "clip", "tower": "text", "view": {"name": "native", "length": ROOM}},
    ),
    "siglip": (
        {"weights": "siglip", "tower": "vision", "view": "native"},
        {"weights": "siglip", "tower": "text", "trainable": 1, "view": {"length": ROOM}},
    ),
    "convolutions": (
        {"weights": "resnet", "trainable": "all"},
        {"weights": "distilbert", "view": {"name": "native", "length": ROOM}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_export_gives_the_vectors_of_the_run(tiny: dict[str, Any], tmp_path: Path, case: str) -> None:
    image, text = CASES[case]
    for encoder in (image, text):
        save(encoder["weights"], tmp_path / "weights")
    for participant in (tiny["server"], *tiny["clients"].values()):
        for modality, encoder in (("image", image), ("text", text)):
            if modality in participant["model"]["encoders"]:
                participant["model"]["encoders"][modality] = {"name": "hf", **encoder}
    tiny["data"]["weights_dir"] = str(tmp_path / "weights")
    tiny["run"]["rounds"] = 1
    run(Experiment.load(tiny), tmp_path / "run", quiet=True)
    pictures = []
    for seed in range(3):
        file = io.BytesIO()
        noise(seed, 40, 28).save(file, "PNG")
        pictures.append(file.getvalue())
    ours = load_model(tmp_path / "run").encode(images=pictures, texts=TEXTS)
    out = export_model(tmp_path / "run", tmp_path / "out")
    theirs = load_model(out, allow_code=True).encode(images=pictures, texts=TEXTS)
    for found, expected in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.abs(expected - expected[:1]).max() > 1e-3
