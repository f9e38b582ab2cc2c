"""Features of frozen networks, and inputs of pretrained networks against their own processor and tokenizer."""

from __future__ import annotations

import errno
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers import BertConfig, BertModel, BertTokenizerFast, CLIPConfig, RobertaConfig, ViTConfig, ViTModel

from item_tables import noise, struct_of, unread
from misbehaving import noted, raising
from polyfed.core.errors import ConfigError, DataError
from polyfed.data import backbones
from polyfed.data.backbones import TextPreparation, quiet
from polyfed.data.source import Column
from polyfed.data.view import DataContext
from polyfed.data.views.features import FeatureComputation, Features, Native
from tiny_networks import PREPROCESSOR, ROOM, save

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
STATISTICS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def png(seed: int, side: int = 20) -> dict[str, bytes | str | None]:
    return struct_of(noise(seed, side, 28), f"{seed}.png")


def column(values: list, fingerprint: str = "f") -> Column:
    return Column(pa.chunked_array([values[:3], values[3:]] if len(values) > 3 else [values]), fingerprint, "here")


@pytest.fixture
def context(tmp_path) -> DataContext:
    torch.manual_seed(0)
    folder = tmp_path / "weights" / "vit"
    with quiet():
        ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8), add_pooling_layer=False).save_pretrained(folder)
    preprocessor = {"size": {"height": 32, "width": 32}, "resample": 3, **STATISTICS}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return DataContext(tmp_path / "cache", weights=tmp_path / "weights")


def bert_in(folder: Path) -> BertModel:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "runs"]
    with quiet():
        BertModel(BertConfig(**SMALL, vocab_size=8), add_pooling_layer=False).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(words))
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
        return BertModel.from_pretrained(folder, add_pooling_layer=False).eval()


@pytest.fixture
def loads(monkeypatch) -> list[Path]:
    return noted(monkeypatch, backbones, "frozen_backbone")


@pytest.mark.parametrize(("pool", "shape"), [("auto", (16,)), ("mean", (16,)), ("tokens", (17, 16))])
def test_features_equal_the_backbone_by_hand(context, pool, shape):
    view = Features(backbone="vit", pool=pool, batch_size=2)
    images = [png(seed) for seed in range(5)]
    opened = view.open(column(images), "image", context)
    assert view.spec("image", context).shape == shape
    assert len(opened) == 5
    rows = torch.tensor([4, 0, 4])
    got = opened(rows)
    assert got.shape == (3, *shape)
    assert got.dtype == torch.float32
    with quiet():
        model = ViTModel.from_pretrained(context.weights / "vit", add_pooling_layer=False).eval()
    for row, result in zip(rows.tolist(), got, strict=True):
        picture = Image.open(io.BytesIO(images[row]["bytes"])).resize((32, 32), Image.Resampling.BICUBIC)
        tokens = model(torch.tensor(np.asarray(picture)).permute(2, 0, 1)[None] / 127.5 - 1).last_hidden_state[0]
        expected = {"auto": tokens[0], "mean": tokens.mean(0), "tokens": tokens}[pool]
        torch.testing.assert_close(result, expected, atol=5e-3, rtol=5e-3)
    assert torch.equal(opened(rows, torch.Generator()), got)


def test_features_are_computed_once_per_content_and_settings(context, loads):
    images = [png(seed) for seed in range(3)]
    view = Features(backbone="vit")

    def of(view: Features, column: Column) -> torch.Tensor:
        anew = replace(context, fitted={})  # of another run
        return view.open(column, "image", anew)(torch.arange(3))

    assert torch.equal(of(view, column(images)), of(view, column(images)))
    of(Features(backbone="vit", batch_size=1), column(images))
    of(Features(backbone=str(context.weights / "vit")), column(images))
    of(view, column(images, "copied elsewhere"))
    assert len(loads) == 1
    of(view, column([*images[:2], png(3)], "other"))
    of(Features(backbone="vit", size=24), column(images))
    of(Features(backbone="vit", pool="mean"), column(images))
    assert len(loads) == 4
    preprocessor = context.weights / "vit" / "preprocessor_config.json"
    preprocessor.write_text(preprocessor.read_text() + " ")
    of(view, column(images))
    assert len(loads) == 5


def test_only_rows_that_are_asked_for_are_encoded_with_the_bits_of_the_whole(context, monkeypatch):
    bert_in(context.weights / "bert")
    texts = ["a dog runs", "a", "dog", "a dog a dog", "runs", "a dog", "dog dog", "a a a", "runs runs"]
    columns = {"image": column([png(seed) for seed in range(9)]), "text": column(texts, "t")}
    views = {"image": Features(backbone="vit", batch_size=2), "text": Features(backbone="bert", batch_size=2)}
    elsewhere = replace(context, cache=context.cache / "whole")
    for modality, view in views.items():
        complete = view.open(columns[modality], modality, elsewhere)(torch.arange(9))
        encoded = noted(monkeypatch, FeatureComputation, "_batch", lambda computation, rows, *shape: rows)
        opened = view.open(columns[modality], modality, context)
        opened.prepare(torch.tensor([7, 2, 8]))
        assert torch.equal(opened(torch.tensor([2, 7, 8])), complete[[2, 7, 8]])
        assert sorted(row for rows in encoded for row in rows) == [2, 7, 8]
        assert torch.equal(view.open(columns[modality], modality, context)(torch.arange(9)), complete)
        assert sorted(row for rows in encoded for row in rows) == [*range(9)]
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"positions": 4}, "set pool to tokens"), ({"positions": 6, "pool": "tokens"}, "a square such as")],
)
def test_positions_that_cannot_be_are_refused(context, settings, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        Features(backbone="vit", **settings).spec("image", context)


def test_fewer_positions_are_averages(context):
    images = column([png(seed) for seed in range(2)])
    few, all_of = (Features(backbone="vit", pool="tokens", positions=count) for count in (4, None))
    assert few.spec("image", context).shape == (5, 16)
    opened, complete = (view.open(images, "image", context)(torch.arange(2)) for view in (few, all_of))
    torch.testing.assert_close(opened[:, 0], complete[:, 0])
    torch.testing.assert_close(opened[:, 1], complete[:, [1, 2, 5, 6]].mean(1), atol=5e-3, rtol=5e-3)


def test_spec_needs_no_weights_and_is_remembered(context, monkeypatch):
    view = Features(backbone="vit", size=48, pool="tokens")
    monkeypatch.setattr(backbones, "frozen_backbone", None)
    assert view.spec("image", context).shape == (37, 16)
    monkeypatch.setattr(backbones, "outline", None)
    assert view.spec("image", context).shape == (37, 16)
    assert view.spec("image", DataContext(context.cache, weights=context.weights)).shape == (37, 16)


def test_what_is_in_the_cache_needs_neither_the_column_nor_the_backbone(context, monkeypatch):
    first = Features(backbone="vit").open(column([png(0), png(1)]), "image", context)(torch.arange(2))
    monkeypatch.setattr(backbones, "outline", None)
    anew = DataContext(context.cache, weights=context.weights)
    assert torch.equal(first, Features(backbone="vit").open(unread(nested=False), "image", anew)(torch.arange(2)))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_where_the_disk_is_full_features_are_computed_by_batch_which_is_reported(context, monkeypatch, caplog, call):
    images, view, rows = [png(seed) for seed in range(6)], Features(backbone="vit"), torch.tensor([5, 0, 5])
    kept = view.open(column(images), "image", replace(context, cache=context.cache / "roomy"))(rows)

    monkeypatch.setattr(os, call, raising(OSError(errno.ENOSPC, "No space left on device")))
    opened = view.open(column(images), "image", context)
    torch.testing.assert_close(opened(rows), kept, atol=2e-3, rtol=2e-3)
    assert "computed anew for every batch" in caplog.text
    assert "No space left on device" in caplog.text
    assert len(opened) == 6
    assert torch.equal(opened(rows), opened(rows, torch.Generator()))


def test_an_empty_column_has_no_rows(context):
    empty = Column(pa.chunked_array([pa.array([], pa.struct({"bytes": pa.binary()}))]), "e", "here")
    opened = Features(backbone="vit").open(empty, "image", context)
    assert len(opened) == 0
    assert opened(torch.arange(0)).shape == (0, 16)


def test_a_bad_value_is_named(context):
    images = [png(0), png(1), png(2), {"bytes": b"no image", "path": "x.png"}]
    with pytest.raises(DataError, match=r"here, row 3 \(path 'x\.png'\): backbone 'vit' cannot read it"):
        Features(backbone="vit").open(column(images), "image", context)(torch.tensor([3]))
    with pytest.raises(DataError, match=r"row 0: .*neither bytes nor a path but str"):
        Features(backbone="vit").open(column(["a text"], "texts"), "text", context)(torch.tensor([0]))
    assert not list(context.cache.glob("*.npy"))


def test_bf16_is_close_and_cached_apart(context):
    images = [png(seed) for seed in range(3)]
    full = Features(backbone="vit").open(column(images), "image", context)(torch.arange(3))
    half = Features(backbone="vit", precision="bf16").open(column(images), "image", context)(torch.arange(3))
    assert not torch.equal(full, half)
    torch.testing.assert_close(full, half, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    ("pool", "positions", "shape"),
    [("auto", None, ()), ("mean", None, ()), ("tokens", None, (6,)), ("tokens", 1, (1,))],
)
def test_texts_have_features_too(context, pool, positions, shape):
    model = bert_in(context.weights / "bert")
    view = Features(backbone="bert", pool=pool, positions=positions, length=6, batch_size=2)
    opened = view.open(column(["a dog", "a dog runs", "runs", "a a a a a a a a"]), "text", context)
    assert view.spec("text", context).shape == (*shape, 16)
    for row, tokens in enumerate([[2, 5, 6, 3], [2, 5, 6, 7, 3], [2, 7, 3], [2, 5, 5, 5, 5, 3]]):
        states = model(torch.tensor([tokens])).last_hidden_state[0]
        padded = torch.nn.functional.pad(states, (0, 0, 0, 6 - len(tokens)))
        expected = {"auto": states[0], "mean": states.mean(0), "tokens": padded}[pool]
        expected = expected if positions is None else states.mean(0, keepdim=True)
        torch.testing.assert_close(opened(torch.tensor([row]))[0], expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("form", ["bert", "clip", "roberta"])
def test_a_text_longer_than_the_backbone_s_positions_is_refused_before_any_work(context, monkeypatch, form):
    folder = context.weights / form
    text = {**SMALL, "vocab_size": 30, "max_position_embeddings": 40}
    configs = {
        "bert": BertConfig(**text),
        "clip": CLIPConfig(text_config=text, vision_config={**SMALL, "image_size": 32, "patch_size": 8}),
        "roberta": RobertaConfig(**text, pad_token_id=1),
    }
    configs[form].save_pretrained(folder)
    monkeypatch.setattr(backbones, "outline", lambda *_: pytest.fail("work was begun"))
    view = Features(backbone=form, tower="text" if form == "clip" else "whole")
    (folder / "vocab.txt").write_text("x")
    most = 38 if form == "roberta" else 40  # roberta's positions begin behind its padding id
    message = rf"length is 64, but the text backbone '{form}' has positions for {most} tokens; set the view's length to"
    with pytest.raises(ConfigError, match=message):
        view.spec("text", context)
    monkeypatch.setattr(TextPreparation, "of", classmethod(lambda cls, *_, **__: "prepared"))
    assert view.model_copy(update={"length": most}).prepare(folder) == "prepared"


def test_stored_flickr8k_features_are_reproduced(tmp_path):
    data, weights = os.environ.get("POLYFED_DATA"), os.environ.get("POLYFED_WEIGHTS")
    if data is None or weights is None:
        pytest.skip("POLYFED_DATA and POLYFED_WEIGHTS are not set")
    folder = Path(data) / "flickr8k"
    context = DataContext(tmp_path, weights=Path(weights))
    images = pq.read_table(next(folder.glob("test-*.parquet")), columns=["image"]).column("image").slice(0, 16)
    stored = pq.read_table(folder / "features-deit-tiny.parquet", filters=[("split", "=", "test")])
    reference = torch.tensor(stored["features"].slice(0, 16).to_pylist())
    view = Features(backbone="deit-tiny-patch16-224", batch_size=8)
    got = view.open(Column(images, "flickr", "flickr8k"), "image", context)(torch.arange(16))
    # both are rounded to float16: they differ by one step of that at most
    torch.testing.assert_close(got, reference, atol=2e-3, rtol=1e-3)


# ---- inputs by a network's own folder

TEXTS = ["w1 w2 w3", "w4", "w5 unheard w6 w7 w8", "", " ".join(f"w{number}" for number in range(20))]


@pytest.fixture
def networks(tmp_path: Path) -> DataContext:
    for name in ("vit", "bert", "clip", "roberta"):
        save(name, tmp_path / "weights")
    return DataContext(tmp_path / "cache", tmp_path / "weights")


def native(view: Native, values: list[Any], networks: DataContext) -> torch.Tensor:
    column = Column(pa.chunked_array([values]), f"{len(values)} values", "here")
    return view.open(column, "m", networks)(torch.arange(len(values)))


@pytest.mark.parametrize(
    ("changes", "side"),
    [
        ({}, 40),
        ({"resample": 2, "do_normalize": False}, 40),
        ({"do_rescale": False}, 40),
        ({"rescale_factor": 1 / 127.5, "size": {"height": 24, "width": 24}}, 40),
        ({"do_center_crop": True, "crop_size": {"height": 24, "width": 24}, "size": {"shortest_edge": 24}}, 28),
    ],
)
def test_pixels_are_those_of_the_folders_processor(changes: dict[str, Any], side: int, networks: DataContext) -> None:
    form = hf.CLIPImageProcessorPil if "do_center_crop" in changes else hf.ViTImageProcessorPil
    content = PREPROCESSOR | changes
    (networks.weights / "vit" / "preprocessor_config.json").write_text(json.dumps(content))
    pictures = [png(seed, side) for seed in range(3)]
    result = native(Native(backbone="vit"), pictures, networks)
    images = [Image.open(io.BytesIO(picture["bytes"])) for picture in pictures]
    expected = form(**content)(images, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(result, expected.float(), atol=1e-4, rtol=1e-4)
    assert result.std() > 0.1


@pytest.mark.parametrize(("backbone", "tower"), [("bert", "whole"), ("clip", "text")])
def test_ids_are_those_of_the_folders_own_tokenizer(backbone: str, tower: Any, networks: DataContext) -> None:
    view = Native(backbone=backbone, tower=tower, length=ROOM)
    own = hf.AutoTokenizer.from_pretrained(networks.weights / backbone)
    expected = own(TEXTS, padding=True, truncation=True, max_length=ROOM, return_tensors="pt")["input_ids"]
    result = native(view, TEXTS, networks)
    assert torch.equal(result, expected[:, : result.shape[1]])
    assert (expected[:, result.shape[1] :] == own.pad_token_id).all()
    spec = view.spec("m", networks)
    assert (spec.shape, spec.pad, len(spec.vocabulary)) == ((ROOM,), own.pad_token_id, len(own))


def test_settings_of_ones_own_go_before_those_of_the_folder(networks: DataContext) -> None:
    assert Native(backbone="vit", size=24).spec("m", networks).shape == (3, 24, 24)
    assert Native(backbone="vit", fit="crop").resolved("image", networks).fit == "crop"
    assert Native(backbone="roberta").spec("m", networks).shape == (ROOM,)  # positions of 13 begin behind padding
    assert Native(backbone="bert", length=5).spec("m", networks).shape == (5,)
    assert Native(backbone="clip", tower="vision").spec("m", networks).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("backbone", "file", "message"),
    [
        ("nowhere", None, "view native, backbone: no folder 'nowhere'"),
        ("vit", "preprocessor_config.json", "lacks preprocessor_config.json"),
        ("bert", "tokenizer*.json", "lacks a tokenizer"),
    ],
)
def test_what_a_folder_lacks_is_named(backbone: str, file: str | None, message: str, networks: DataContext) -> None:
    for path in (networks.weights / backbone).glob(file) if file else ():
        path.unlink()
    with pytest.raises(ConfigError, match=message):
        Native(backbone=backbone).spec("m", replace(networks, fitted={}))
