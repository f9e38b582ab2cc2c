"""Sources, views and tokenizers as they stand in a configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from polyfed.core.settings import Settings
from polyfed.data.images import Augment, Flip, Shift
from polyfed.data.source import Source
from polyfed.data.sources.mimic_cxr import MimicCxr
from polyfed.data.sources.questions import Questions
from polyfed.data.sources.scenes import Scenes
from polyfed.data.sources.stored import Parquet
from polyfed.data.tokenizers import Glove, Hashing, Tokenizer, Words
from polyfed.data.view import View
from polyfed.data.views.features import Features
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens

WHERE = {"ok": True, "mention": [1, 0], "country": ["Italy", "1"]}


@pytest.mark.parametrize(
    ("family", "settings", "expected"),
    [
        (Source, "scenes", Scenes(train=2000, validation=300, test=300, size=64, targets={"label": "label"},
                                  columns={"image": "image", "text": "captions"})),
        (Source, {"name": "parquet", "path": "set", "where": WHERE, "incomplete": "leave_out", "matches": "note"},
         Parquet(path="set", where=WHERE, incomplete="leave_out", matches="note")),
        (Source, {"name": "mimic_cxr", "path": "cxr"},
         MimicCxr(path="cxr", columns={"image": "image", "text": "text"}, matches="study")),
        (Source, {"name": "questions", "of": {"name": "parquet", "path": "set", "columns": {"text": "questions"}}},
         Questions(of=Parquet(path="set", columns={"text": "questions"}), columns={"text": "questions"})),
        (View, {"name": "tokens", "tokenizer": {"name": "hashing", "size": 99}, "drop": 0.1},
         Tokens(tokenizer=Hashing(size=99), drop=0.1)),
        (View, "tokens", Tokens(tokenizer=Words(), length=32)),
        (View, {"name": "pixels", "size": 32, "normalise": "imagenet", "augment": {"flip": True, "shift": 4}},
         Pixels(size=32, normalise="imagenet", augment=Augment(flip=Flip(), shift=Shift(pixels=4)))),
        (View, "pixels", Pixels(size=64)),
        (View, {"name": "features", "backbone": "vit", "pool": "mean"}, Features(backbone="vit", pool="mean")),
        (Tokenizer, "words", Words()),
        (Tokenizer, {"name": "hashing", "size": 64}, Hashing(size=64)),
        (Tokenizer, {"name": "glove", "folders": ["a"]}, Glove(folders=("a",))),
    ],
)  # fmt: skip
def test_components_are_named_and_survive_writing(family: type[Settings], settings: Any, expected: Settings) -> None:
    component = family.model_validate(settings)
    assert type(component) is type(expected)
    assert component == expected
    assert family.model_validate(json.loads(json.dumps(component.model_dump(mode="json")))) == component


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        *((Parquet, {"path": "set", "where": {"ok": value}}) for value in ([], None, 1.5, [None])),
        *((MimicCxr, {"path": "x"} | wrong) for wrong in ({"views": []}, {"sections": ["()"]}, {"labels": "negative"})),
        (Pixels, {"normalise": "mnist"}),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(form: type[Settings], settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(reversed(settings))):
        form.model_validate(settings)
