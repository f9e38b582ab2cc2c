from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tokenizers
import torch
from PIL import Image

from item_tables import encoded
from polyfed.data.cache import decode
from polyfed.data.images import normalised
from polyfed.data.source import Column
from polyfed.data.tokenizers import Glove, Hashing, PretrainedTokenizer, Tokenizer, Wordpiece, Words
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.table import Table
from polyfed.data.views.tokens import Tokens
from polyfed.export.inputs import Recipe, recipe

TEXTS = [
    "A red square, above THE blue circle!",
    "two stars",
    "",
    "unheard-of wörds 42",
    "a a a a a a a a a a a a",
    "...",
    " \ufffd\u200b",
    "ΟΔΟΣ x² naïve_İ 日本",
]


def prepare(actual: Recipe) -> Any:
    names: dict[str, Any] = {}
    exec("\n".join([*actual.imports, "import torch", actual.functions, actual.code]), names)
    return names["PREPARE"]


@pytest.fixture
def context(tmp_path: Path) -> DataContext:
    (tmp_path / "weights" / "vectors").mkdir(parents=True)
    (tmp_path / "weights" / "vectors" / "words.txt").write_text("a\nred\nsquare\ncircle\n42")
    (tmp_path / "weights" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\nred\nsquare\ntwo\n##s\nstar")
    public = Column(pa.chunked_array([TEXTS * 2]), "public", "public")
    return DataContext(tmp_path / "cache", tmp_path / "weights", public={"text": public})


@pytest.mark.parametrize("fixed", [None, 9])
@pytest.mark.parametrize(
    "tokenizer",
    [
        Words(),
        Glove(folders=("vectors",)),
        Hashing(size=50),
        Wordpiece(size=100),
        PretrainedTokenizer(path="vocab.txt"),
    ],
    ids=lambda value: value.component_name(),
)
def test_texts_become_what_the_view_makes_of_them(
    tokenizer: Tokenizer, fixed: int | None, context: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, out = Tokens(tokenizer=tokenizer, length=9), tmp_path / "out"
    out.mkdir()
    spec = view.spec("text", context)
    actual = recipe(view, spec, modality="text", context=context, folder=out, fixed_length=fixed)
    monkeypatch.chdir(out)
    wanted = view.open(Column(pa.chunked_array([TEXTS]), "mine", "mine"), "text", context)(torch.arange(len(TEXTS)))
    ids = prepare(actual)(TEXTS)
    assert ids.shape[1] == (fixed or wanted.shape[1])
    assert torch.equal(ids[:, : wanted.shape[1]], wanted)
    assert (ids[:, wanted.shape[1] :] == spec.pad).all()
    wanted_rows = ids[[bool(text) for text in TEXTS]].tolist()
    if isinstance(tokenizer, Hashing):  # buckets have no names that a tokenizer's file could list
        assert tuple(json.loads((out / "vocabulary.json").read_text())["tokens"]) == spec.vocabulary
        return
    loaded = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = loaded.get_vocab()
    assert all(ids[token] == number for number, token in enumerate(spec.vocabulary))
    assert [encoding.ids for encoding in loaded.encode_batch([text for text in TEXTS if text])] == wanted_rows


def test_two_vocabularies_do_not_meet(context: DataContext, tmp_path: Path) -> None:
    for tokenizer, stem in ((Hashing(size=5), "vocabulary"), (Glove(folders=("vectors",)), "tokenizer")):
        view = Tokens(tokenizer=tokenizer)
        spec = view.spec("text", context)
        for modality in ("text", "question"):
            actual = recipe(view, spec, modality=modality, context=context, folder=tmp_path, suffix=f"-{modality}")
            assert actual.facts[stem] == f"{stem}-{modality}.json"
            assert (tmp_path / f"{stem}-{modality}.json").is_file()


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
@pytest.mark.parametrize("fit", ["squash", "crop"])
def test_images_become_the_inputs_of_the_view(fit: Any, mode: str, context: DataContext, tmp_path: Path) -> None:
    view = Pixels(size=16, fit=fit, resampling="bilinear", normalise="imagenet")
    actual = recipe(view, view.spec("image", context), modality="image", context=context, folder=tmp_path)
    noise = torch.randint(256, (40, 30, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    picture = Image.fromarray(noise.numpy(), "RGBA").convert(mode)
    wanted = normalised(torch.from_numpy(decode(encoded(picture), 16, fit, "bilinear").copy())[None], "imagenet")
    assert torch.allclose(prepare(actual)([picture]), wanted, atol=1e-5)


def test_what_was_learnt_of_a_table_is_in_the_view(context: DataContext, tmp_path: Path) -> None:
    view = Table()
    column = Column(pa.chunked_array([pa.array([{"b": 2.0, "a": "x"}, {"b": 5.0, "a": "y"}])]), "rows", "rows")
    known = replace(context, public={"rows": column})
    resolved, spec = view.resolved("rows", known), view.spec("rows", known)
    actual = recipe(resolved, spec, modality="rows", context=known, folder=tmp_path)
    again = View.model_validate(json.loads(json.dumps(actual.facts["view"])))
    both = (one.open(column, "rows", where)(torch.arange(2)) for one, where in ((view, known), (again, context)))
    assert torch.equal(*both)


class Loudness(View):
    """A view from outside polyfed."""

    def open(self, column: Column, modality: str, context: DataContext) -> Any:
        """Not needed here."""

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """One number."""
        return InputSpec((1,))


def test_a_foreign_view_is_named(context: DataContext, tmp_path: Path) -> None:
    actual = recipe(Loudness(), InputSpec((1,)), modality="sound", context=context, folder=tmp_path)
    assert "Loudness" in actual.words
    assert prepare(actual)(eval(actual.example)).shape == (1, 1)
