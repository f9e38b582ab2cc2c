from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from polyfed.core.errors import RunError
from polyfed.models.heads import LinearHead
from polyfed.runs.opened import open_run
from polyfed.runs.records import RunRecords
from polyfed.runs.saved import SavedModel, read_model


def edit(folder: Path, *, without: str = "", **changes: object) -> None:
    content = {key: value for key, value in (_config(folder) | changes).items() if key != without}
    (folder / "config.json").write_text(json.dumps(content))


def test_a_model_comes_back_with_its_weights_in_evaluation_mode(tiny_run: Path) -> None:
    before = torch.get_rng_state()
    saved = open_run(tiny_run).server_model("last")
    assert torch.equal(torch.get_rng_state(), before)
    assert saved.round == 1
    assert saved.model.modalities == ("image", "text")
    assert not any(module.training for module in saved.model.modules())
    seen = saved.model.state_dict()
    assert seen.keys() == saved.weights.keys()
    assert all(torch.equal(seen[name], value) for name, value in saved.weights.items())


def read(run: Path, folder: Path) -> SavedModel:
    """A model folder, with data and device of a run."""
    opened = open_run(run)
    return read_model(folder, opened.conditions.data, opened.place, allow_code=False)


def test_a_model_folder_alone_is_enough_to_rebuild(tiny_run: Path, copied: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(tiny_run / "models" / "last", tmp_path / "alone")
    shutil.rmtree(copied / "vocabulary")
    saved = read(copied, alone)
    spec = saved.facts.model.encoders["text"].view.spec("text", saved.context)
    learnt = json.loads(next((tiny_run / "vocabulary").glob("*.json")).read_text())["tokens"]
    assert list(spec.vocabulary) == learnt
    assert len(saved.model.encoders["text"].embedding.weight) == len(learnt)


def test_a_head_is_rebuilt_without_the_data_that_sized_it(classifier_run: Path) -> None:
    saved = open_run(classifier_run).server_model()
    assert saved.task.classes is None  # type: ignore[attr-defined]
    assert isinstance(saved.head, LinearHead)
    assert saved.head.out_features == 18  # kinds of generated scenes


@pytest.mark.parametrize(("greatest", "fits"), [(17, True), (16, False)])
def test_labels_size_heads_without_class_names(classifier_run: Path, tmp_path: Path, greatest: int, fits: bool) -> None:
    folder = shutil.copytree(classifier_run / "models" / "last", tmp_path / "model")
    label = {"dtype": "int64", "shape": [], "greatest": greatest}
    edit(folder, samples={"modalities": ["image"], "classes": {}, "targets": {"label": label}})
    with nullcontext() if fits else pytest.raises(RunError, match="do not fit each other"):
        assert read(classifier_run, folder).head.out_features == 18


def test_best_is_preferred_and_either_can_be_asked_for(copied: Path) -> None:
    assert open_run(copied).model_folder().name == "best"
    assert open_run(copied).model_folder("last").name == "last"
    shutil.rmtree(copied / "models" / "best")
    assert open_run(copied).model_folder().name == "last"


def test_a_model_that_is_not_there_is_named(copied: Path) -> None:
    with pytest.raises(RunError, match=r"has no model 'bst'; it has: best \(round \d+\), last \(round \d+\)"):
        open_run(copied).model_folder("bst")
    shutil.rmtree(copied / "models")
    with pytest.raises(RunError, match=r"has no saved model; no round is complete yet \(polyfed resume\)"):
        open_run(copied).model_folder()


UNREADABLE, UNFIT = "no readable model in", "do not fit each other"


def _first_weight(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    name = next(name for name, value in weights.items() if value.is_floating_point())
    safetensors.torch.save_file(weights | {name: change(weights[name])}, file)


def _ending_in(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda weight: torch.cat([weight.flatten()[:-1], torch.tensor([value])]).view_as(weight)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda at: os.truncate(at / "model.safetensors", 100), UNREADABLE),
    "no json": (lambda at: (at / "config.json").write_text("{"), UNREADABLE),
    "nested": (lambda at: (at / "config.json").write_text("[" * 100_000), f"{UNREADABLE}.*nested too deeply"),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), UNREADABLE),
    "no samples": (lambda at: edit(at, without="samples"), UNREADABLE),
    "unknown encoder": (lambda at: edit(at, model={"dim": 8, "encoders": {"image": "resnetz"}}), UNREADABLE),
    "other architecture": (lambda at: edit(at, model=_config(at)["model"] | {"dim": 9}), UNFIT),
    "NaN": (lambda at: _first_weight(at, _ending_in(math.nan)), rf"{UNFIT} \('[\w.]+' has values"),
    "infinite": (lambda at: _first_weight(at, _ending_in(math.inf)), rf"{UNFIT} \('[\w.]+' has values"),
    "int64": (lambda at: _first_weight(at, torch.Tensor.long), rf"{UNFIT} \('[\w.]+' is torch\.int64"),
    "float64": (lambda at: _first_weight(at, torch.Tensor.double), rf"{UNFIT} \('[\w.]+' is torch\.float64"),
    # it is not learnt anew
    "lost vocabulary": (lambda at: shutil.rmtree(at / "vocabulary"), "lacks the vocabulary of 'text'"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_is_an_error_in_one_line(copied: Path, damage: Callable[[Path], object], problem: str) -> None:
    damage(copied / "models" / "last")
    with pytest.raises(RunError, match=problem) as caught:
        open_run(copied).server_model("last")
    assert "\n" not in str(caught.value)


def test_saving_again_keeps_the_vocabulary_files(tiny_run: Path) -> None:
    for which in ("best", "last"):
        kept = {path.name: path.read_bytes() for path in (tiny_run / "models" / which / "vocabulary").iterdir()}
        assert kept == {path.name: path.read_bytes() for path in (tiny_run / "vocabulary").iterdir()}


def test_a_best_model_that_is_the_untrained_one_is_warned_of(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    for which_name in ("best", "last"):
        edit(copied / "models" / which_name, round=0)
    assert RunRecords.load(copied).warnings == ()
