from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
from PIL import Image

import polyfed
from misbehaving import raising
from polyfed import load_model
from polyfed.core.errors import ConfigError, RunError
from polyfed.data.view import InputSpec
from polyfed.export.model import export_model
from polyfed.export.programs import Program
from polyfed.runs.experiment import Experiment
from polyfed.runs.loaded import loaded_model
from polyfed.runs.opened import open_run
from small_federations import tiny_experiment


@pytest.fixture(scope="session")
def exported(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(tiny_run, tmp_path_factory.mktemp("exports") / "tiny", which="last")


def example_of(folder: Path) -> str:
    actual = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert actual is not None
    return actual[1]


def test_everything_is_there_and_nothing_else(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    programs = {"image.pt2", "text.pt2"}
    assert names == {"README.md", "config.json", "model.safetensors", "run.py", "tokenizer.json"} | programs
    assert [path.name for path in exported.parent.iterdir()] == ["tiny"]


def test_the_configuration_describes_model_and_inputs(exported: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert (config["experiment"], config["model"], config["round"], config["dim"]) == ("tiny", "last", 1, 8)
    image, text = config["modalities"]["image"], config["modalities"]["text"]
    assert image["input"] == {"shape": ["batch", 3, 16, 16], "dtype": "float32"}
    assert image["preparation"]["mean"] == [0.5, 0.5, 0.5]
    assert image["encoder"]["widths"] == [8, 8]
    assert text["input"] == {"shape": ["batch", "length"], "dtype": "int64"}
    assert (text["preparation"]["pad"], text["preparation"]["unknown"]) == (0, 1)
    weights = safetensors.torch.load_file(exported / "model.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(exported / text["preparation"]["tokenizer"]))
    assert tokenizer.get_vocab_size() == len(weights["encoders.text.embedding.weight"])


@pytest.mark.parametrize("modality", ["image", "text"])
def test_programs_agree_with_the_live_model_on_any_batch(exported: Path, tiny_run: Path, modality: str) -> None:
    model = open_run(tiny_run).server_model("last").model
    program = torch.export.load(exported / f"{modality}.pt2").module()
    for rows in (1, 7):
        x = torch.randn(rows, 3, 16, 16) if modality == "image" else torch.randint(20, (rows, 3 + rows))
        with torch.no_grad():
            actual = program(x)
            assert actual.shape == (rows, 8)
            assert torch.allclose(actual, model.represent(modality, x), atol=1e-5)


def test_the_weights_of_an_export_give_the_same_vectors_in_the_architecture(exported: Path, tiny_run: Path) -> None:
    server = open_run(tiny_run).server_model("last")
    with torch.no_grad():
        for value in server.model.parameters():
            value.zero_()
    server.model.load_state_dict(safetensors.torch.load_file(exported / "model.safetensors"))
    model = loaded_model("weights", server.model, server.views, server.context)
    given = np.random.default_rng(0).integers(0, 255, (5, 20, 30, 3), dtype=np.uint8), ["a red square", ""]
    exports = load_model(exported, allow_code=True)
    for actual, expected in zip(model.encode(*given), exports.encode(*given), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_example_runs(exported: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(exported)
    monkeypatch.delitem(sys.modules, "run", raising=False)
    names: dict[str, torch.Tensor] = {}
    assert "polyfed" not in example_of(exported)
    exec(example_of(exported), names)
    assert capsys.readouterr().out.startswith("image (1, 8)\ntext (1, 8)\nsimilarity [[")
    assert torch.allclose(names["image"].norm(dim=1), torch.ones(1))


@pytest.mark.slow
def test_a_classifier_gives_logits_and_the_names_of_its_classes(classifier_run: Path, tmp_path: Path) -> None:
    folder = export_model(classifier_run, tmp_path / "out", which="last")
    config = json.loads((folder / "config.json").read_text())
    assert config["classes"][:2] == ["plain circle", "striped circle"]
    saved = open_run(classifier_run).server_model("last")
    model = saved.model
    x = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        actual = torch.export.load(folder / config["modalities"]["image"]["classes_program"]).module()(x)
        wanted = saved.head(model.embed("image", x))
    assert actual.shape == (3, 18)
    assert torch.allclose(actual, wanted, atol=1e-5)
    assert not (folder / "tokenizer.json").exists()
    assert "image-classes.pt2" in (folder / "README.md").read_text()
    picture = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    classes = open_run(classifier_run).model_of(which="last").classify(picture)
    again = load_model(folder, allow_code=True).classify(picture)
    assert (again.names, again.labels) == (classes.names, classes.labels)
    np.testing.assert_allclose(again.probabilities, classes.probabilities, atol=1e-5)
    Image.fromarray(picture).save(tmp_path / "a.png")
    done = subprocess.run([sys.executable, folder / "run.py", "--images", tmp_path / "a.png"], capture_output=True)
    assert f"a.png: {classes.labels[0]} {classes.probabilities.max():.3f}, " in done.stdout.decode()


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are not traced."""

    def write(function: object, parts: object, spec: InputSpec, path: Path, what: str) -> Program:
        path.write_text(what)
        return Program(path, ("batch", *spec.shape), tokens=False)

    monkeypatch.setattr("polyfed.export.model.write_program", write)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("imputation", ["drop", "placeholder"])
def test_a_classifier_that_fills_in_for_modalities_is_refused(imputation: str, tmp_path: Path) -> None:
    config = tiny_experiment()
    paired = config["clients"]["paired"] | {"task": {"name": "classification", "imputation": imputation}}
    config["data"]["sources"]["scenes"]["targets"] = {"label": "label"}
    server = {key: paired[key] for key in ("model", "task", "source", "training")}
    experiment = Experiment.load(config | {"server": server, "clients": {"paired": paired}})
    run = polyfed.run(experiment, tmp_path / "run", quiet=True)
    if imputation == "drop":
        names = {path.name for path in export_model(run.folder, tmp_path / "e", which="last").iterdir()}
        assert {"image-classes.pt2", "text-classes.pt2"} <= names
        return
    with pytest.raises(ConfigError, match=r"fills in for the others \(task.imputation placeholder\)"):
        export_model(run.folder, tmp_path / "e", which="last")
    assert not (tmp_path / "e").exists()


@pytest.mark.usefixtures("cheap")
def test_the_run_folder_is_the_default_and_only_empty_folders_are_filled(classifier_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(classifier_run, tmp_path / "run")
    (run / "export").mkdir()
    assert export_model(run) == run / "export"
    assert json.loads((run / "export" / "config.json").read_text())["model"] == "best"
    assert (run / "export" / "image.pt2").is_file()
    with pytest.raises(RunError, match=r"exists and is not empty; remove it or choose another --out"):
        export_model(run)


@pytest.mark.parametrize("failing", ["export", "save"])
def test_nothing_is_left_of_an_export_that_fails(
    classifier_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    errors = {"export": RuntimeError("no such operator\nand a long story"), "save": OSError(28, "No space")}
    monkeypatch.setattr(torch.export, failing, raising(errors[failing]))
    message = r"encoder 'image' \(resnet\) cannot be exported.*no such operator" if failing == "export" else "No space"
    with pytest.raises(RunError, match=message) as caught:
        export_model(classifier_run, tmp_path / "below" / "out")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "below").iterdir()) == []
