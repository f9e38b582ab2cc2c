"""The folder for the Hugging Face hub: loads without polyfed, gives the same vectors, describes the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from polyfed import load_model
from polyfed.data.view import DataContext, InputSpec
from polyfed.export.model import export_hugging_face, network_code
from polyfed.export.programs import example_input, write_program
from polyfed.models.encoders.from_config import ViT
from polyfed.models.encoders.words import GRU

TEXTS = ["a red square above a blue circle", "", "?!", "nothing of the kind"]
ALONE = """
import sys
sys.modules["polyfed"] = None
import torch
from PIL import Image
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
pictures = [Image.open(path) for path in sys.argv[3:]]
texts = {texts!r}
torch.save({{"image": model.encode("image", pictures), "text": model.encode("text", texts)}}, sys.argv[2])
model.save_pretrained(sys.argv[2] + "-again")
"""


@pytest.fixture(scope="session")
def folder(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_hugging_face(tiny_run, tmp_path_factory.mktemp("hugging-face") / "tiny", which="last")


def pictures(folder: Path) -> list[str]:
    values = np.random.default_rng(0).integers(0, 255, (4, 20, 30, 3), dtype=np.uint8)
    paths = [str(folder / f"{k}.png") for k in range(4)]
    for path, pixels in zip(paths, values, strict=True):
        Image.fromarray(pixels).save(path)
    return paths


@pytest.mark.slow  # a process that starts; the code, its values and the names of its tensors are tested below
def test_it_loads_without_polyfed_and_gives_the_same_vectors(folder: Path, tiny_run: Path, tmp_path: Path) -> None:
    paths, out = pictures(tmp_path), tmp_path / "vectors.pt"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", ALONE.format(texts=TEXTS), str(folder), str(out), *paths]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "MISSING" not in done.stderr
    assert "UNEXPECTED" not in done.stderr
    vectors = torch.load(out)
    expected = load_model(tiny_run, which="last").encode(paths, TEXTS)
    for modality, values in zip(("image", "text"), expected, strict=True):
        np.testing.assert_allclose(vectors[modality].numpy(), values, atol=1e-5)


@pytest.mark.slow
def test_the_code_does_without_polyfed_and_the_card_is_complete(folder: Path) -> None:
    code = (folder / "modeling_polyfed.py").read_text()
    assert "import polyfed" not in code
    assert "from polyfed" not in code
    assert "device(type" not in code
    names = {path.name for path in folder.iterdir()}
    assert names == {"README.md", "config.json", "modeling_polyfed.py", "model.safetensors", "tokenizer.json"}
    _, meta, card = (folder / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(meta)["tags"] == ["polyfed", "federated-learning", "multimodal", "fedavg", "image", "text"]
    for title in ("Data", "Method", "Metrics", "Federation", "Privacy"):
        assert f"\n## {title}\n" in card
    for words in ("fedavg", "r1_sum (test)", "paired: 2 clients, 32 items of scenes", "sent weights", "1 rounds until"):
        assert words in card, words


TOKENS = InputSpec((6,), tuple(f"word {number}" for number in range(30)), pad=0)
PIXELS = InputSpec((3, 16, 16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "spec"),
    [
        (lambda: GRU(width=4, readout="last").build(5, TOKENS, DataContext(Path())), TOKENS),
        (lambda: ViT(size="nano", patch=8).build(5, PIXELS, DataContext(Path())), PIXELS),
    ],
)
def test_written_code_computes_what_the_network_does(network: Any, spec: InputSpec, tmp_path: Path) -> None:
    made = network().eval()
    program = write_program(made, [made], spec, tmp_path / "x.pt2", "x")
    code, tensors = network_code(torch.export.load(program.path).module(check_guards=False), "x")
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    exec("import math, operator\nfrom torch import inf, nan\n" + code, names)
    for rows in (1, 4):
        x = example_input(spec, rows=rows)
        assert torch.allclose(names["network_x"](tensors, x), made(x), atol=1e-6)


@pytest.mark.slow
def test_the_command_writes_such_a_folder(tiny_run: Path, tmp_path: Path, cli: Any) -> None:
    code, printed, _ = cli("export", tiny_run, "--out", tmp_path / "out", "--format", "huggingface")
    assert (code, printed.splitlines()[0]) == (0, f"exported and checked: {tmp_path / 'out'}")
    assert "it needs transformers, torch, numpy, pillow, tokenizers, and no polyfed\n" in printed
    assert (tmp_path / "out" / "modeling_polyfed.py").is_file()


def test_the_configuration_names_all_tensors(folder: Path) -> None:
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    named = {f"networks.{name}.{key}" for name, kinds in config["tensors"].items() for key in kinds}
    assert named == set(load_file(folder / "model.safetensors"))
