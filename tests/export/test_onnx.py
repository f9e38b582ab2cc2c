"""ONNX files, run by onnxruntime."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyfed import export_model, load_model
from polyfed.core.errors import ConfigError, RunError
from polyfed.data.view import InputSpec
from polyfed.export import programs
from polyfed.export.programs import write_program


def test_without_the_extra_the_command_to_install_it_is_told(
    tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    pytest.importorskip("onnx")
    with pytest.raises(ConfigError, match=r"'onnxruntime', which is not installed; pip install \"polyfed\[onnx\]\""):
        export_model(tiny_run, tmp_path / "export", onnx=True)
    assert list(tmp_path.iterdir()) == []


def test_values_that_differ_are_no_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    spec, network = InputSpec((4,)), torch.nn.Linear(4, 2)
    program = write_program(network, network, spec, tmp_path / "x.pt2", "encoder 'x'")
    assert programs.write_onnx(program, spec, "encoder 'x'").name == "x.onnx"
    monkeypatch.setattr(programs, "loaded_program", lambda path: lambda x: network(x) + 1e-3)
    with pytest.raises(RunError, match="onnxruntime gives values that differ by"):
        programs.write_onnx(program, spec, "encoder 'x'")


@pytest.mark.slow
def test_the_command_writes_what_gives_pictures_and_texts_the_same_vectors(
    tiny_run: Path, tmp_path: Path, cli: Any
) -> None:
    ort = pytest.importorskip("onnxruntime")
    folder = tmp_path / "export"
    code, said, _ = cli("export", tiny_run, "--out", folder, "--model", "last", "--format", "onnx")
    assert (code, said.splitlines()[0]) == (0, f"exported and checked: {folder}")
    readme = (folder / "README.md").read_text()
    assert "`image.onnx`, `text.onnx`: the same programs as ONNX" in readme
    program = "\n".join(re.findall(r"```python\n(.*?)```", readme, re.DOTALL))
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "(1, 8)"
    model = load_model(folder, allow_code=True)
    pictures = np.random.default_rng(0).integers(0, 255, (5, 20, 30, 3), dtype=np.uint8)
    texts = ["a red square", "", "a blue circle above a green one", "?"]
    for modality, values in (("image", pictures), ("text", texts)):
        session = ort.InferenceSession(folder / f"{modality}.onnx")
        encoder = model.encoders[modality]
        object.__setattr__(
            encoder, "represent", lambda x, run=session.run: torch.from_numpy(run(None, {"input": x.numpy()})[0])
        )
        found = model.encode_modality(modality, values)
        np.testing.assert_allclose(
            found, load_model(tiny_run, which="last").encode_modality(modality, values), atol=1e-5
        )


@pytest.mark.slow
def test_classifiers_are_written_too(classifier_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    folder = export_model(classifier_run, tmp_path / "export", onnx=True)
    assert {path.name for path in folder.glob("*.onnx")} == {"image.onnx", "image-classes.onnx"}
