"""Rows without content."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from polyfed.data.assembly import assemble
from polyfed.data.source import Source
from polyfed.data.view import DataContext
from polyfed.data.views.pixels import Pixels

CONTENT = {"image": "picture", "captions": "texts", "news": "text", "label": 3}


def blank(**settings: object) -> Source:
    columns = {"image": "image", "text": "captions"}
    return Source.model_validate(
        {"name": "blank", "rows": 4, "content": CONTENT, "columns": columns, "targets": {"label": "label"}} | settings
    )


def test_rows_are_as_many_and_of_the_kinds_that_are_asked_for(tmp_path: Path) -> None:
    split = blank(entries=2).open("anything", name="made_up", data_dir=None)
    assert list(split.ids) == [f"made_up/anything:{row}" for row in range(4)]
    assert split.modality("text").values.to_pylist() == [["a text of seven words in all"] * 2] * 4
    assert not split.read("news").nested
    samples = assemble(split, {"image": Pixels(size=8)}, DataContext(tmp_path), layout=("image", "text"))
    assert samples.targets["label"].tolist() == [0, 0, 1, 1, 2, 2, 0, 0]
    assert samples.batch(samples.items[:2]).inputs["image"].shape == (2, 3, 8, 8)


def test_there_may_be_more_classes_than_rows() -> None:
    split = blank(rows=2, content=CONTENT | {"label": 7}).open("train", name="made_up", data_dir=None)
    assert len(split.classes["label"]) == 7


@pytest.mark.parametrize("content", [{"image": "noise"}, {"label": 0}])
def test_other_contents_are_refused(content: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="content"):
        blank(content=content)
