"""Models for use: images and texts in, unit vectors out, the same as the federation's own pipeline gives."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch import nn

from polyfed import load_model, open_run
from polyfed.core.errors import ConfigError, DataError, RunError
from polyfed.data.sounds import wav
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.export.model import export_model
from polyfed.models.heads import LinearHead
from polyfed.models.model import ModelSettings
from polyfed.reporting.gallery import Retrieval, Shelf, Viewer
from polyfed.runs.loaded import LoadedModel, loaded_model
from polyfed.tasks.classification import Classification
from polyfed.tasks.imputations import LeaveOut
from polyfed.tasks.task import Joint, Task
from tiny_networks import save


def stored_pictures(split: Any) -> list[bytes]:
    return [entry["bytes"] for entry in split.modality("image").values.to_pylist()]


def values(run: Path) -> tuple[list[bytes], list[str]]:
    """Images and texts of the server's test split, as they are stored."""
    split = open_run(run).federation.data.split("scenes", "test")
    pictures = stored_pictures(split)
    return pictures, split.modality("text").texts()[: len(pictures)]


@pytest.mark.parametrize("participant", ["server", "paired-0"])
def test_vectors_are_those_of_the_runs_own_pipeline(tiny_run: Path, participant: str) -> None:
    opened = open_run(tiny_run)
    pictures, texts = values(tiny_run)
    loaded = opened.model_of(participant)
    if participant == "server":
        model = opened.server_model().model
    else:
        model = opened.global_model(next(own for own, c in opened.types.items() if "paired" in str(c.clients)))
    samples = opened.federation.server_samples("test")
    for modality, seen in zip(("image", "text"), loaded.encode(images=pictures, texts=texts), strict=True):
        rows = samples.inputs[modality](torch.arange(len(seen)))
        with torch.no_grad():
            expected = model.represent(modality, rows).numpy()
        np.testing.assert_allclose(seen, expected, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(seen, axis=1), 1, atol=1e-5)


def test_an_image_gives_one_vector_in_any_form(tiny_run: Path, tmp_path: Path) -> None:
    model = load_model(tiny_run)
    data = values(tiny_run)[0][0]
    (tmp_path / "a.png").write_bytes(data)
    image = Image.open(io.BytesIO(data))
    forms = [data, tmp_path / "a.png", str(tmp_path / "a.png"), image, np.asarray(image.convert("RGB"))]
    vectors = model.encode(images=forms)
    assert np.abs(vectors - vectors[0]).max() == 0
    for form in forms:
        np.testing.assert_allclose(model.encode(images=form), vectors[:1], atol=1e-6)
    assert model.encode(images=np.stack([np.asarray(image.convert("RGB"))] * 2)).shape == (2, 8)
    assert model.encode(texts=[]).shape == (0, 8)


def test_similarity_and_search_agree_with_products(tiny_run: Path) -> None:
    model = load_model(tiny_run)
    pictures, texts = values(tiny_run)
    x, y = model.encode(images=pictures, texts=texts)
    np.testing.assert_allclose(model.similarity(pictures, texts), x @ y.T, atol=1e-6)
    hits = model.search(texts[0], pictures, k=3)
    assert [hit.position for hit in hits] == np.argsort(-(x @ y[0]), kind="stable")[:3].tolist()
    assert hits[0].similarity == pytest.approx(float((x @ y[0]).max()), abs=1e-6)
    assert model.search(pictures[0], texts, k=99) == model.search(pictures[0], y, k=99)
    assert len(model.search(pictures[0], texts, k=99)) == len(texts)


def test_searches_encode_an_image_once(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, encoded = load_model(tiny_run), []
    pictures, texts = values(tiny_run)
    encode = LoadedModel.encode_modality

    def counted(self: LoadedModel, modality: str, items: Any) -> Any:
        encoded.extend(items if modality == "image" else [])
        return encode(self, modality, items)

    monkeypatch.setattr(LoadedModel, "encode_modality", counted)
    for name, data in zip("abc", pictures, strict=False):
        (tmp_path / f"{name}.png").write_bytes(data)
    gallery = [*pictures[3:], *(tmp_path / f"{name}.png" for name in "abc")]
    first = [model.search(text, gallery) for text in texts[:3]]
    assert len(encoded) == len(gallery)
    assert [model.search(text, gallery) for text in texts[:3]] == first
    (tmp_path / "b.png").write_bytes(pictures[5] + b" ")  # another image under the same name
    again = {hit.position: hit.similarity for hit in model.search(texts[0], gallery, len(gallery))}
    assert len(encoded) == len(gallery) + 1
    assert again[len(gallery) - 2] == pytest.approx(again[2], abs=1e-6)
    monkeypatch.setattr("polyfed.runs.loaded._REMEMBERED", 5)
    model.search(texts[0], pictures[:2])
    assert len(model.remembered) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.encode(), "nothing to encode"),
        (lambda model: model.encode(images=[3.5]), "an image is a path.*not float"),
        (lambda model: model.encode(texts=[3]), "a text is a string, not a int"),
        (lambda model: model.encode(images=[b"not an image"]), "row 0"),
        (lambda model: model.encode_modality("sound", ["x"]), "no modality 'sound'"),
        (lambda model: model.search("x", np.zeros((3, 5), np.float32)), "width 5; this model's are 8"),
        (lambda model: model.encode(images=np.zeros((4, 4))), "not array of float64"),
        (lambda model: model.classify(texts="a"), "not trained to classify.*it has encode, similarity, search"),
    ],
)
def test_what_cannot_be_encoded_is_refused(tiny_run: Path, call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((ConfigError, DataError), match=message):
        call(load_model(tiny_run))


def test_a_model_without_texts_refuses_them(classifier_run: Path) -> None:
    with pytest.raises(ConfigError, match="no encoder of texts; it has: image"):
        load_model(classifier_run).encode(texts=["a"])
    with pytest.raises(ConfigError, match="no participant 'image-7'"):
        load_model(classifier_run, "image-7")
    with pytest.raises(ConfigError, match="of client 'image' one model is kept"):
        load_model(classifier_run, "image", which="best")


@pytest.mark.slow
def test_an_export_gives_the_vectors_of_its_run(tiny_run: Path, tmp_path: Path) -> None:
    folder = export_model(tiny_run, tmp_path / "export")
    pictures, texts = values(tiny_run)
    texts = [*texts, "", "?!", "unheard of words"]
    for seen, expected in zip(
        load_model(folder, allow_code=True).encode(pictures, texts),
        load_model(tiny_run).encode(pictures, texts),
        strict=True,
    ):
        np.testing.assert_allclose(seen, expected, atol=1e-5)
    with pytest.raises(ConfigError, match="is an export, which holds one model"):
        load_model(folder, "server")
    (folder / "image.pt2").unlink()
    with pytest.raises(RunError, match="the export is incomplete"):
        load_model(folder, allow_code=True)
    with pytest.raises(ConfigError, match=r"its programs are code; .* pass allow_code=True"):
        load_model(folder)
    with pytest.raises(RunError, match="neither a run folder nor an export"):
        load_model(tmp_path)


def test_kept_models_of_clients(fedafd_run: Path) -> None:
    model = load_model(fedafd_run, "paired-1")
    assert model.encode(texts="a red square").shape == (1, 8)
    assert repr(model).startswith("LoadedModel(paired-1 of run: image, text")


def test_modalities_of_any_name_are_recognised_by_their_views(tmp_path: Path) -> None:
    networks = {name: str(save(one, tmp_path / "weights")) for name, one in (("photo", "vit"), ("caption", "bert"))}
    native = {"name": "hf", "view": "native"}
    loaded = untrained(tmp_path, **{name: native | {"weights": place} for name, place in networks.items()})
    assert (loaded.modality_of("image"), loaded.modality_of("text")) == ("photo", "caption")
    assert loaded.encode(texts=["w1", "w2 w3"]).shape == (2, 5)


def untrained(
    folder: Path,
    *,
    task: Task | None = None,
    head: nn.Module | None = None,
    classes: Mapping[str, list[str]] = MappingProxyType({}),
    **encoders: dict[str, object],
) -> LoadedModel:
    context = DataContext(folder / "cache")
    model = ModelSettings.model_validate({"dim": 5, "encoders": encoders})
    views = {name: encoder.view for name, encoder in model.encoders.items()}
    built = model.build({} if head is None else {"own": head}, context).eval()
    return loaded_model("mine", built, views, context, task, head, classes)


def test_sounds_of_more_than_a_block_are_encoded_and_retrieved(tmp_path: Path) -> None:
    view = {"name": "mel", "rate": 8000, "bands": 8, "frames": 8}
    model = untrained(tmp_path, audio={"name": "resnet", "widths": [2], "depths": [1], "view": view})
    stream = np.random.default_rng(0)
    sounds = [wav(stream.normal(size=800).astype(np.float32) / 4, 8000) for _ in range(17)]
    vectors = model.encode_modality("audio", sounds)
    np.testing.assert_allclose(vectors[16:], model.encode_modality("audio", sounds[16:]), atol=1e-6)
    column = Column(pa.chunked_array([pa.array(sounds)]), "sounds", "here")
    shelf = Shelf("audio", sounds, np.arange(17), lambda view: view.open(column, "audio", DataContext(tmp_path)))
    retrieval = Retrieval(Viewer("mine", model, model), {"audio": shelf}, 3)
    assert len(retrieval.retrieved("after", "audio", "audio", 16)) == 3


def test_a_row_of_a_table_is_one_value(tmp_path: Path) -> None:
    view = {"name": "table", "cells": {"age": {"mean": 10}, "sex": {"names": ["F", "M"]}}}
    model = untrained(tmp_path, table={"name": "projection", "view": view})
    row = {"age": 12.0, "sex": "M"}
    np.testing.assert_array_equal(model.encode_modality("table", row), model.encode_modality("table", [row]))


@pytest.mark.parametrize("participant", ["server", "image"])
def test_a_classifying_model_gives_names_and_probabilities(classifier_run: Path, participant: str) -> None:
    opened = open_run(classifier_run)
    samples = opened.federation.server_samples("test")
    pictures = stored_pictures(opened.federation.data.split("private", "test"))
    classes = opened.model_of(participant).classify(pictures, batch=3)
    model = opened.server_model().model if participant == "server" else opened.global_model(next(iter(opened.types)))
    (head,) = model.heads.values()
    with torch.no_grad():
        expected = head(model.embed("image", samples.inputs["image"](torch.arange(len(pictures))))).softmax(1).numpy()
    np.testing.assert_allclose(classes.probabilities, expected, atol=1e-6)
    assert classes.names == samples.classes["label"]
    assert classes.labels == [classes.names[number] for number in expected.argmax(1)]
    assert opened.model_of(participant).classify([]).probabilities.shape == (0, 18)


TABLE = {"name": "projection", "view": {"name": "table", "cells": {"age": {"mean": 10}}}}
BAG = {"name": "bag", "width": 4, "view": {"name": "tokens", "tokenizer": {"name": "hashing", "size": 50}}}


def test_samples_of_several_modalities_are_classified_together_with_what_they_have(tmp_path: Path) -> None:
    head = LinearHead(5, 3)
    head.add_module("imputer", LeaveOut().imputer(5, ["table", "text"]))
    task, names = Classification(), {"label": ["a", "b", "c"]}
    model = untrained(tmp_path, task=task, head=head, classes=names, table=TABLE, text=BAG)
    texts, rows = ["one two", None, "three"], [{"age": 12.0}, {"age": 3.0}, None]
    seen = model.classify(texts=texts, table=rows, batch=2).probabilities
    alone = model.classify(texts=["one two", "three"]).probabilities, model.classify(table=rows[:2]).probabilities
    np.testing.assert_allclose(seen[1:], [alone[1][1], alone[0][1]], atol=1e-6)
    together = np.log(alone[0][0]) + np.log(alone[1][0])  # the mean of embeddings gives the mean of logits
    np.testing.assert_allclose(np.log(seen[0]) - np.log(seen[0, 0]), (together - together[0]) / 2, atol=1e-5)
    for call, message in (
        (lambda: model.classify(), "classifies by some of table, text; given are: none"),
        (lambda: model.classify(texts=["x"], table=rows), "as many values as there are samples"),
        (lambda: model.classify(texts=[None], table=[None]), "a sample is None in all modalities"),
        (lambda: model.classify(texts=["x"], target="sex"), "does not classify 'sex'.*label"),
        (lambda: model.classify(np.zeros((4, 4), np.uint8)), "no encoder of images"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            call()


def test_a_model_of_several_tasks_classifies_by_each(tmp_path: Path) -> None:
    tasks = Joint(tasks=(Classification(), Classification(target="topic", modality="text")))
    heads = nn.ModuleDict({name: LinearHead(5, number) for name, number in zip(tasks.by_name, (3, 2), strict=True)})
    model = untrained(tmp_path, task=tasks, head=heads, classes={"topic": ["x", "y"]}, table=TABLE, text=BAG)
    assert model.classify(texts="one").names == ("0", "1", "2")
    assert model.classify(texts="one", target="topic").names == ("x", "y")
    with pytest.raises(ConfigError, match="classifies by some of text; given are: table"):
        model.classify(table={"age": 1.0}, target="topic")
