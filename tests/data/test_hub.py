"""Data sets of the hub, through a load_dataset that gives an in-memory data set."""

from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from polyfed.core.errors import DataError
from polyfed.data.sources.arrow import Hub

FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "answers": datasets.List(datasets.ClassLabel(names=["no", "yes"])),
    }
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of load_dataset."""
    calls = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        calls.append((path, name, split, revision))
        rows = {"text": ["one", "two", "three"], "label": [0, 1, 0], "answers": [[0], [1, 0], []]}
        return datasets.Dataset.from_dict(rows, features=FEATURES)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


def hub(**settings: Any) -> Hub:
    return Hub(repository="me/pets", columns={"words": "text"}, targets={"y": "label", "a": "answers"}, **settings)


def test_reads_columns_and_class_names(asked: list[tuple[Any, ...]]) -> None:
    source = hub(config="small", revision="abc", splits={"validation": "train[90%:]"})
    split = source.open("validation", name="pets", data_dir=None)
    assert asked == [("me/pets", "small", "train[90%:]", "abc")]
    assert split.modality("words").values.to_pylist() == ["one", "two", "three"]
    assert split.read("answers").values.to_pylist() == [[0], [1, 0], []]
    assert split.classes == {"y": ("cat", "dog"), "a": ("no", "yes")}
    assert split.ids == ("me/pets/validation:0", "me/pets/validation:1", "me/pets/validation:2")


def test_selected_rows_are_respected(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = datasets.load_dataset("me/pets", None, split="train", revision=None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: whole.select([2, 0]))
    split = hub(id="text").open("train", name="pets", data_dir=None)
    assert split.ids == ("three", "one")
    assert split.modality("words").values.to_pylist() == ["three", "one"]


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach the Hub"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'me/pets' doesn't exist"),
        ValueError('Unknown split "train". Should be one of ["all"].'),
    ],
)
def test_what_cannot_be_loaded_is_a_data_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"source 'pets': cannot load 'me/pets' .*split 'train'.*'parquet'") as caught:
        hub().open("train", name="pets", data_dir=None)
    assert str(error) in str(caught.value)


def test_sends_no_telemetry(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    hub().open("train", name="pets", data_dir=None)
    assert datasets.config.HF_UPDATE_DOWNLOAD_COUNTS is False
    assert constants.HF_HUB_DISABLE_TELEMETRY is True
