"""Models of pretrained networks without polyfed: their own processor's pixels, their own tokenizer's ids."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn

from item_tables import noise
from polyfed import Experiment, load_model, run
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.features import Features, States
from polyfed.export.inputs import recipe
from polyfed.export.model import export_model
from polyfed.export.programs import on_raw_inputs
from polyfed.models.model import Model
from polyfed.runs.opened import Run
from tiny_networks import ROOM, save

TEXTS = ["w1 w2", "w3 unheard w4 w5 w6", "", " ".join(f"w{number}" for number in range(20))]
LENGTH, NATIVE = {"length": ROOM}, {"name": "native", "length": ROOM}
BERT = {"weights": "bert", "trainable": 1, "pooling": "mean"}
CASES = {
    "layers": ({"weights": "vit", "adapter": "lora"}, BERT | {"view": NATIVE}),
    "clip": (
        {"weights": "clip", "tower": "vision", "trainable": 1, "view": "native"},
        {"weights": "clip", "tower": "text", "view": NATIVE},
    ),
    "siglip": (
        {"weights": "siglip", "tower": "vision", "view": "native"},
        {"weights": "siglip", "tower": "text", "trainable": 1, "view": LENGTH},
    ),
    "states": ({"weights": "vit", "trainable": 1}, BERT | {"view": LENGTH}),
    "positions": (
        {"weights": "resnet", "view": {"pool": "tokens", "positions": 1}, "pooling": "mean", "pie": True},
        {"weights": "clip", "tower": "text", "view": {"pool": "tokens", "length": ROOM}, "pooling": "mean"},
    ),
    "convolutions": ({"weights": "resnet", "trainable": "all"}, {"weights": "distilbert", "view": NATIVE}),
}


ALONE = """
import json, sys
sys.modules["polyfed"] = None
folder, *pictures = sys.argv[1:]
texts = {texts!r}
sys.path.insert(0, folder)
import run
sys.argv = ["run.py", "--images", *pictures, "--texts", *texts]
run.main()
print(json.dumps([run.encode("image", pictures).tolist(), run.encode("text", texts).tolist()]))
"""


def trained(tiny: dict[str, Any], folder: Path, image: dict[str, Any], text: dict[str, Any]) -> Run:
    """A run of one round with pretrained encoders."""
    for encoder in (image, text):
        save(encoder["weights"], folder / "weights")
    for participant in (tiny["server"], *tiny["clients"].values()):
        for modality, encoder in (("image", image), ("text", text)):
            if modality in participant["model"]["encoders"]:
                participant["model"]["encoders"][modality] = {"name": "hf", **encoder}
    tiny["data"]["weights_dir"] = str(folder / "weights")
    tiny["run"]["rounds"] = 1
    return run(Experiment.load(tiny), folder / "run", quiet=True)


def pictures(folder: Path) -> list[str]:
    """A large JPEG, an image of 16 bits and a transparent one."""
    noise(0, 300, 200).save(folder / "a.jpg")
    Image.fromarray(np.random.default_rng(0).integers(0, 4096, (40, 30), dtype=np.uint16)).save(folder / "b.png")
    clear = noise(1, 40, 28)
    clear.putalpha(100)
    clear.save(folder / "c.png")
    return ["a.jpg", "b.png", "c.png"]


VIEWS = [
    Features(backbone="vit"),
    Features(backbone="resnet", pool="tokens", positions=4, fit="crop"),
    Features(backbone="bert", pool="mean", length=ROOM),
    Features(backbone="clip", tower="text", length=ROOM),
    States(backbone="bert", before_last=1, length=ROOM),
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view.backbone}-{view.component_name()}-{view.pool}")
def test_values_become_the_features_of_a_view(view: Features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(view.backbone, tmp_path / "weights")
    context = DataContext(tmp_path / "cache", tmp_path / "weights")
    model = Model({"x": nn.Identity()}, {}, 1)
    raw = on_raw_inputs(model, {"x": view}, context)["x"]
    how = recipe(raw, raw.spec("x", context), modality="x", context=context, folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    values: Any = TEXTS if how.takes == "texts" else pictures(tmp_path)
    structs = values if how.takes == "texts" else [{"bytes": Path(name).read_bytes(), "path": None} for name in values]
    column = Column(pa.chunked_array([structs]), "mine", "mine", folder=tmp_path)
    expected = view.open(column, "x", context).compute(range(len(values)))  # type: ignore[attr-defined]
    names = dict[str, Any](Path=Path)
    exec("\n".join([*how.imports, "import torch", how.functions, how.code]), names)
    given = values if how.takes == "texts" else [Image.open(name) for name in values]
    with torch.no_grad():
        torch.testing.assert_close(model.encoders["x"](names["PREPARE"](given)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # a process that starts
def test_an_export_of_cached_features_takes_images_and_texts_without_polyfed(
    tiny: dict[str, Any], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"weights": "bert", "pooling": "mean", "view": {"length": ROOM}}
    model = trained(tiny, tmp_path, {"weights": "vit"}, text).model
    code, printed, _ = cli("export", tmp_path / "run", "--out", tmp_path / "out")
    assert code == 0
    assert "pretrained networks are in it, whose licences go with them: vit, bert\n" in printed
    assert f'python {tmp_path / "out" / "run.py"} --images a.jpg b.jpg --texts "a text" "another text"\n' in printed
    assert "it needs torch, numpy, pillow, tokenizers, and no polyfed\n" in printed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    files = pictures(Path())
    vectors = model.encode(files, TEXTS)
    shutil.rmtree(tmp_path / "weights")
    command = [sys.executable, "-I", "-c", ALONE.format(texts=TEXTS), "../out", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *shown, made = done.stdout.splitlines()
    assert shown[0] == "similarity (image, text)"
    assert len(shown) == 1 + len(files) * len(TEXTS)
    for actual, expected in zip(json.loads(made), vectors, strict=True):
        np.testing.assert_allclose(np.array(actual), expected, atol=1e-5)
        assert np.abs(expected - expected[:1]).max() > 1e-3
    for name in ("README.md", "config.json", "run.py"):
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_export_gives_the_vectors_of_the_run(
    tiny: dict[str, Any], tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained(tiny, tmp_path, *CASES[case]).model
    monkeypatch.chdir(tmp_path)
    files = pictures(tmp_path)
    ours = model.encode(images=files, texts=TEXTS)
    out = export_model(tmp_path / "run", tmp_path / "out")
    theirs = load_model(out, allow_code=True).encode(images=files, texts=TEXTS)
    for actual, expected in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        assert np.abs(expected - expected[:1]).max() > 1e-3
