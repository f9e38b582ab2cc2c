import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from polyfed.core.errors import DataError
from polyfed.data.scenery.layout import LABELS
from polyfed.data.scenery.rendering import picture
from polyfed.data.scenery.wording import ANSWERS, TOPICS
from polyfed.data.source import Split
from polyfed.data.sources import scenes as module
from polyfed.data.sources.scenes import ATTRIBUTES, SCHEMA, Scenes

COLUMNS = ["id", "image", "captions", "label", "text", "topic", "questions", "answers", "mask", "audio", *ATTRIBUTES]


def opened(split: str = "train", **settings: object) -> Split:
    small = {"train": 24, "validation": 6, "test": 8, **settings}
    return Scenes.model_validate(small).open(split, name="shapes", data_dir=None)


def values(split: Split, column: str) -> list:
    return split.read(column).values.to_pylist()


@pytest.mark.parametrize(("split", "count"), [("train", 24), ("validation", 6), ("test", 8)])
def test_every_column_has_a_value_for_each_item(split: str, count: int):
    data = opened(split)
    assert len(data) == count
    assert SCHEMA.names == COLUMNS
    for column in COLUMNS:
        assert len(data.read(column).values) == count
        assert data.read(column).values.type == SCHEMA.field(column).type
    assert data.source == "shapes"
    assert data.name == split


def test_ids_are_unique_over_splits_and_seeds():
    ids = [id_ for seed in (0, 1) for split in ("train", "validation", "test") for id_ in opened(split, seed=seed).ids]
    assert len(set(ids)) == len(ids) == 2 * 38


def test_images_and_masks_decode_to_the_size_that_was_asked_for():
    data = opened(size=32)
    for column, mode in (("image", "RGB"), ("mask", "L")):
        for value in values(data, column):
            image = Image.open(io.BytesIO(value["bytes"]))
            assert image.size == (32, 32)
            assert image.mode == mode
    mask = np.array(Image.open(io.BytesIO(values(data, "mask")[0]["bytes"])))
    assert set(np.unique(mask)) == {0, 255}


def test_labels_have_names_and_fit_them():
    data = opened(targets={"label": "label", "topic": "topic", "answer": "answers"})
    assert data.classes == {"label": LABELS, "topic": TOPICS, "answer": ANSWERS}
    assert set(values(data, "label")) <= set(range(18))
    assert set(values(data, "topic")) <= set(range(6))
    assert data.read("answers").nested


def test_pictures_are_drawn_only_when_they_are_read(monkeypatch: pytest.MonkeyPatch):
    drawn: Counter[int] = Counter()

    def counting(scene, recipe, index):
        drawn[index] += 1
        return picture(scene, recipe, index)

    monkeypatch.setattr(module, "picture", counting)
    data = opened()
    for column in ("captions", "label", "text", "topic", "questions", "answers"):
        values(data, column)
    image = data.read("image")
    assert image.fingerprint
    assert not image.nested
    assert not drawn
    assert len(image.values) == len(image.values) == 24
    assert drawn == Counter(range(24))


def test_same_settings_give_the_same_bytes_and_fingerprints():
    first, second = opened(), opened()
    module.drawn_scene.cache_clear()
    for column in COLUMNS:
        assert first.read(column).fingerprint == second.read(column).fingerprint
        assert first.read(column).values.equals(second.read(column).values)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"size": 32}, {"difficulty": 0.6}, {"domain": "night"}, {"shift": 0.2}, {"train": 25}],
    ids=str,
)
def test_every_setting_changes_the_fingerprint_and_the_picture_or_count(changed: dict[str, object]):
    base, other = opened(), opened(**changed)
    assert base.read("image").fingerprint != other.read("image").fingerprint
    assert not base.read("image").values.equals(other.read("image").values)


def test_fingerprints_differ_by_split_and_column():
    stamps = {opened(split).read(column).fingerprint for split in ("train", "test") for column in COLUMNS}
    assert len(stamps) == 2 * len(COLUMNS)


def test_a_larger_set_starts_with_the_smaller_one_and_domains_show_the_same_scenes():
    base, larger, sketch = opened(), opened(train=30), opened(domain="sketch", shift=0.3)
    for column in COLUMNS:
        assert values(larger, column)[:24] == values(base, column)
        assert (values(sketch, column) == values(base, column)) == (column != "image")


def test_no_picture_or_label_pattern_repeats_in_another_split():
    train, test = opened("train"), opened("test")
    pictures = [value["bytes"] for data in (train, test) for value in values(data, "image")]
    assert len(set(pictures)) == len(pictures) == 32
    assert values(train, "captions")[:8] != values(test, "captions")


@pytest.mark.parametrize(
    ("split", "settings", "message"),
    [
        ("trian", {}, "source 'shapes': no split 'trian'; did you mean 'train'"),
        ("validation", {"validation": 0}, "split 'validation' is empty, as validation=0"),
        ("train", {"columns": {"text": "caption"}}, "no column 'caption'; did you mean 'captions'"),
        ("train", {"targets": {"label": "image"}}, "image"),
    ],
)
def test_errors_name_what_is_wrong_and_what_would_be_valid(split: str, settings: dict[str, object], message: str):
    with pytest.raises(DataError, match=message):
        opened(split, **settings)


@pytest.mark.parametrize(
    "bad",
    [{"difficulty": 1.1}, {"domain": "dusk"}, {"size": 8}, {"shift": -0.1}, {"train": -1}, {"colour": 1}],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, object]):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Scenes.model_validate(bad)


def test_the_schema_loads_with_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features.from_arrow_schema(SCHEMA)
    assert features["label"].names == list(LABELS)
    assert features["answers"].feature.names == list(ANSWERS)
    assert isinstance(features["image"], datasets.Image)
