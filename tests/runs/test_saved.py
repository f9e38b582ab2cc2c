from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from polyfed.core.errors import RunError
from polyfed.models.heads import LinearHead
from polyfed.runs.opened import open_run
from polyfed.runs.records import RunRecords
from polyfed.runs.saved import read_saved_model


@pytest.fixture
def copied(tiny_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_run, tmp_path / "copy")


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_comes_back_with_its_weights_in_evaluation_mode(tiny_run: Path, tmp_path: Path) -> None:
    saved = read_saved_model(open_run(tiny_run).model_folder("last"))
    model = saved.build(saved.context(tmp_path))
    assert saved.config["round"] == 1
    assert model.modalities == ("image", "text")
    assert not any(module.training for module in model.modules())
    found = model.state_dict()
    assert found.keys() == saved.weights.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.weights.items())


def test_a_description_that_is_nested_too_deeply_is_refused(copied: Path) -> None:
    model = open_run(copied).model_folder("last")
    (model / "config.json").write_text("[" * 100_000)
    with pytest.raises(RunError, match=r"no readable model in .*nested too deeply"):
        read_saved_model(model)


def test_building_leaves_the_global_generator_alone(tiny_run: Path, tmp_path: Path) -> None:
    saved = read_saved_model(open_run(tiny_run).model_folder())
    before = torch.get_rng_state()
    saved.build(saved.context(tmp_path))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_folder_alone_is_enough_to_rebuild(tiny_run: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(tiny_run / "models" / "last", tmp_path / "alone")
    saved = read_saved_model(alone)
    spec = saved.settings.encoders["text"].view.spec("text", saved.context(tmp_path / "cache"))
    learnt = json.loads(next((tiny_run / "vocabulary").glob("*.json")).read_text())["tokens"]
    assert list(spec.vocabulary) == learnt
    assert len(saved.build(saved.context(tmp_path / "cache")).encoders["text"].embedding.weight) == len(learnt)


def test_a_head_is_rebuilt_without_the_data_that_sized_it(classifier_run: Path, tmp_path: Path) -> None:
    saved = read_saved_model(open_run(classifier_run).model_folder())
    assert saved.task.classes is None  # type: ignore[attr-defined]
    head = saved.build(saved.context(tmp_path)).heads[saved.config["head"]]
    assert isinstance(head, LinearHead)
    assert head.out_features == 18  # kinds of generated scenes


@pytest.mark.parametrize(("greatest", "fits"), [(17, True), (16, False)])
def test_labels_size_a_head_where_no_class_names_are_known(
    classifier_run: Path, tmp_path: Path, greatest: int, fits: bool
) -> None:
    folder = shutil.copytree(classifier_run / "models" / "last", tmp_path / "model")
    label = {"dtype": "int64", "shape": [], "greatest": greatest}
    edit(folder, samples={"modalities": ["image"], "classes": {}, "targets": {"label": label}})
    saved = read_saved_model(folder)
    if fits:
        assert saved.build(saved.context(tmp_path)).heads[saved.config["head"]].out_features == 18
    else:
        with pytest.raises(RunError, match="do not fit each other"):
            saved.build(saved.context(tmp_path))


def test_best_is_preferred_and_either_can_be_asked_for(copied: Path) -> None:
    assert open_run(copied).model_folder().name == "best"
    assert open_run(copied).model_folder("last").name == "last"
    shutil.rmtree(copied / "models" / "best")
    assert open_run(copied).model_folder().name == "last"


def test_a_model_that_is_not_there_is_named(copied: Path) -> None:
    with pytest.raises(RunError, match=r"has no model 'bst'; it has: best \(round \d+\), last \(round \d+\)"):
        open_run(copied).model_folder("bst")
    shutil.rmtree(copied / "models")
    with pytest.raises(RunError, match="has no server model"):
        open_run(copied).model_folder()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        open_run(tmp_path).model_folder()


@pytest.mark.parametrize("damage", ["cut", "no json", "no weights", "no samples", "unknown encoder"])
def test_a_damaged_model_is_an_error_in_one_line(copied: Path, damage: str) -> None:
    folder = copied / "models" / "last"
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "no json":
        config.write_text("{")
    elif damage == "no weights":
        weights.unlink()
    elif damage == "no samples":
        config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "samples"}))
    else:
        edit(folder, model={"dim": 8, "encoders": {"image": "resnetz"}})
    with pytest.raises(RunError, match="no readable model in") as caught:
        read_saved_model(folder)
    assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_refused(copied: Path, tmp_path: Path) -> None:
    folder = copied / "models" / "last"
    model = json.loads((folder / "config.json").read_text())["model"]
    edit(folder, model=model | {"dim": 9})
    saved = read_saved_model(folder)
    with pytest.raises(RunError, match="do not fit each other") as caught:
        saved.build(saved.context(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["NaN", "infinite", "int64", "float64"])
def test_weights_that_are_no_weights_are_refused_by_name(copied: Path, tmp_path: Path, kind: str) -> None:
    file = copied / "models" / "last" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    name = next(name for name, value in weights.items() if value.is_floating_point())
    if kind in ("NaN", "infinite"):
        weights[name].view(-1)[-1] = float("nan" if kind == "NaN" else "inf")
    else:
        weights[name] = weights[name].to(getattr(torch, kind))
    safetensors.torch.save_file(weights, file)
    with pytest.raises(RunError, match=rf"do not fit each other \('{name}' (is torch\.{kind}|has values)"):
        open_run(copied).server_model("last")


def test_a_lost_vocabulary_is_not_learnt_anew(copied: Path, tmp_path: Path) -> None:
    shutil.rmtree(copied / "models" / "last" / "vocabulary")
    saved = read_saved_model(open_run(copied).model_folder("last"))
    with pytest.raises(RunError, match="vocabulary of 'text' is missing"):
        saved.build(saved.context(tmp_path))


def test_saving_again_keeps_the_vocabulary_files(tiny_run: Path) -> None:
    for which in ("best", "last"):
        kept = {path.name: path.read_bytes() for path in (tiny_run / "models" / which / "vocabulary").iterdir()}
        assert kept == {path.name: path.read_bytes() for path in (tiny_run / "vocabulary").iterdir()}


def test_a_best_model_that_is_the_untrained_one_is_told(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(copied / "models" / "best", round=0)
    open_run(copied).server_model().warn_if_untrained()
    assert "best model by validation is that of round 0, before any training" in caplog.text
    assert "round 0" in RunRecords.load(copied).warnings[-1]
    caplog.clear()
    open_run(copied).server_model("last").warn_if_untrained()
    edit(copied / "models" / "best", round=1)
    open_run(copied).server_model().warn_if_untrained()
    assert not caplog.text
    assert RunRecords.load(copied).warnings == ()


def test_a_run_that_has_only_been_judged_before_training_has_no_such_warning(copied: Path) -> None:
    for kind in ("best", "last"):
        edit(copied / "models" / kind, round=0)
    assert RunRecords.load(copied).warnings == ()
