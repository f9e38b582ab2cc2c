from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from polyfed import Experiment, open_run
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.sources.scenes import SCHEMA, Scenes
from polyfed.runs.evaluation import Target, evaluate_model
from polyfed.runs.records import RunRecords
from run_folders import redigested


def scenes_table(*columns: str, seed: int = 0, test: int = 12) -> pa.Table:
    """The test split of the generated scenes, as a table with class names."""
    target = [name for name in columns if name in ("label", "topic", "answers")]
    source = Scenes(test=test, size=16, seed=seed, columns={}, targets={name: name for name in target})
    split = source.open("test", name="scenes", data_dir=None)
    return pa.table({name: split.read(name).values for name in columns}).replace_schema_metadata(SCHEMA.metadata)


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "pictures"
    folder.mkdir(parents=True)
    pq.write_table(scenes_table("image", "captions", "label"), folder / "test-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("split", ["test", "validation"])
def test_the_figures_of_the_run_are_found_again(tiny_run: Path, split: str) -> None:
    seen = evaluate_model(tiny_run, Target("scenes", split), which="last")
    assert seen.metrics == RunRecords.load(tiny_run).last("server", split)
    assert (seen.model, seen.round, seen.items, seen.samples) == ("last", 1, 12, 60)


def test_figures_of_the_server_come_with_intervals_over_test_items(tiny_run: Path, classifier_run: Path) -> None:
    for run, names in ((tiny_run, ("r1_sum", "text_to_image_r@10")), (classifier_run, ("accuracy",))):
        records = RunRecords.load(run)
        for name in names:
            low, high = records.interval("server", name) or (0.0, 0.0)
            assert low <= records.last("server")[name] <= high
            assert low < high


def test_the_best_model_is_that_of_the_best_validation(tiny_run: Path) -> None:
    number, value = RunRecords.load(tiny_run).best("server", "r1_sum", "validation") or (-1, 0.0)
    seen = evaluate_model(tiny_run, Target("scenes", "validation"))
    assert (seen.model, seen.round, seen.metrics["r1_sum"]) == ("best", number, value)


def test_any_folder_of_images_and_captions_will_do(tiny_run: Path, parquet: Path) -> None:
    expected = evaluate_model(tiny_run, "scenes").metrics
    assert evaluate_model(tiny_run, str(parquet)).metrics == expected
    assert evaluate_model(open_run(tiny_run, data_dir=parquet.parent), "pictures").metrics == expected


def test_columns_of_other_names_are_given(tiny_run: Path, parquet: Path) -> None:
    table = scenes_table("image", "captions").rename_columns(["photo", "sentences"])
    pq.write_table(table, parquet / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"--column image=NAME, where NAME is one of: photo, sentences"):
        evaluate_model(tiny_run, str(parquet))
    with pytest.raises(DataError, match=r"no column 'nope' for 'image'"):
        evaluate_model(tiny_run, Target(str(parquet), columns={"image": "nope"}))
    seen = evaluate_model(tiny_run, Target(str(parquet), columns={"image": "photo", "text": "sentences"}))
    assert seen.metrics == evaluate_model(tiny_run, "scenes").metrics


def test_a_model_is_judged_without_the_code_of_its_method(tiny_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tiny_run, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["algorithm"] = {"name": "median.Median"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert evaluate_model(redigested(run), "scenes").metrics == evaluate_model(tiny_run, "scenes").metrics
    with pytest.raises(ConfigError, match=r"cannot import 'median.Median': .* on PYTHONPATH"):
        Experiment.load(run / "config.yaml")


def test_the_public_set_is_not_needed(tiny_run: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = evaluate_model(tiny_run, "scenes").metrics
    monkeypatch.setattr(Scenes, "open", Mock(side_effect=DataError("the public set is not here")))
    assert evaluate_model(tiny_run, str(parquet)).metrics == expected


def test_a_run_folder_may_be_moved(tiny_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_run, tmp_path / "elsewhere")
    assert evaluate_model(moved, "scenes") == evaluate_model(tiny_run, "scenes")


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        ("scens", "test", "neither a source of the run nor a folder.*did you mean 'scenes'"),
        ("scenes", "tset", "no split 'tset'; did you mean 'test'"),
        ("pictures", "train", "no split 'train'"),
    ],
)
def test_data_that_is_not_there(tiny_run: Path, parquet: Path, data: str, split: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        evaluate_model(open_run(tiny_run, data_dir=parquet.parent), Target(data, split))
    assert "\n" not in str(caught.value)


def test_labels_of_other_classes_are_refused(classifier_run: Path, parquet: Path) -> None:
    assert evaluate_model(classifier_run, str(parquet)).metrics["n"] == 12
    pq.write_table(scenes_table("image", "topic"), parquet / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"classes of 'label' .* differ from those that the model learnt"):
        evaluate_model(classifier_run, Target(str(parquet), targets={"label": "topic"}))
    with pytest.raises(ConfigError, match="target 'label' is not among"):
        evaluate_model(classifier_run, str(parquet))


def test_threads_are_as_before(tiny_run: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    evaluate_model(tiny_run, "scenes")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
