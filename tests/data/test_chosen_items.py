"""Items once chosen: those that answer each other, targets that are not integers, caches of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from item_tables import context_of, opened, table, written
from polyfed.core.errors import DataError
from polyfed.data.assembly import assemble, of_items
from polyfed.data.backbones import quiet
from polyfed.data.tokenizers import Words
from polyfed.data.view import DataContext
from polyfed.data.views.features import Features
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens

# ---- right answers to each other


def test_items_with_equal_values_answer_each_other(tmp_path: Path) -> None:
    split = opened(written(tmp_path), matches="note", columns={"image": "image", "text": "captions"})
    views = {"image": Pixels(size=8), "text": Tokens(tokenizer=Words(), length=4)}
    context = DataContext(tmp_path / "cache", public={"text": split.modality("text")})
    samples = assemble(split, views, context)
    notes = table()["note"].to_pylist()
    owners = [notes[item] if (notes[item] or " ").strip() else f"<{item}>" for item in samples.items.tolist()]
    assert samples.matches.dtype == torch.int64
    assert len(samples) == 12
    for i, mine in enumerate(owners):
        for j, other in enumerate(owners):
            assert (samples.matches[i] == samples.matches[j]).item() == (mine == other), (i, j)
    assert samples.batch(torch.tensor([0, 4])).matches.unique().numel() == 1
    part = of_items(samples, torch.tensor([2, 0]))
    assert part.matches.tolist() == [samples.matches[0].item()] * 4


def test_matches_default_to_the_items_and_survive_selection(tmp_path: Path) -> None:
    views = {"image": Pixels(size=8)}
    plain = assemble(opened(written(tmp_path)), views, context_of(tmp_path))
    assert plain.matches.tolist() == plain.items.tolist()
    split = opened(tmp_path, matches="group", where={"country": "Italy"})
    assert assemble(split, views, context_of(tmp_path)).matches.tolist() == [0, 1, 0]


# ---- the first rows


def test_only_the_first_rows_of_a_split_are_items(tmp_path: Path) -> None:
    written(written(tmp_path), "test")
    kept = {"first": {"train": 4}, "matches": "group"}
    assert len(opened(tmp_path, **kept).ids) == 4
    assert len(opened(tmp_path, "test", **kept).ids) == len(opened(tmp_path, "train").ids) == 6
    assert len(opened(tmp_path, **kept, where={"country": "Italy"}).ids) == 2
    assert len(opened(tmp_path, first={"train": 99}).ids) == 6
    assert len(opened(tmp_path, first={"train": 4, "validation": 2, "test": 1}).ids) == 4
    message = r"first\.trian: no split of the source; valid are train, validation, test, .* did you mean 'train'\?"
    with pytest.raises(DataError, match=message):
        opened(tmp_path, first={"trian": 4})
    written(tmp_path, "dev")
    assert len(opened(tmp_path, "dev", first={"train": 4, "dev": 3}).ids) == 3
    assert len(opened(tmp_path, first={"train": 4, "dev": 3}).ids) == 4


# ---- targets that are not integers


def test_text_targets_are_numbered_alike_in_all_splits(tmp_path: Path) -> None:
    written(written(tmp_path), "test", finding=["normal", "covid", "covid", "pneumonia", "normal", "covid"])
    train = opened(tmp_path, targets={"y": "finding"})
    test = opened(tmp_path, "test", targets={"y": "finding"}, where={"country": "Italy"})
    assert train.classes == test.classes == {"y": ("covid", "normal", "pneumonia")}
    assert train.read("finding").values.to_pylist() == [2, 0, 2, 0, 2, 0]
    assert test.read("finding").values.to_pylist() == [1, 0, 0]


@pytest.mark.parametrize("gap", [None, " "])
def test_text_targets_with_gaps(tmp_path: Path, gap: str | None) -> None:
    written(tmp_path, finding=["b", gap, "a", "b", "a", "a"])
    refused = opened(tmp_path, targets={"y": "finding"})
    assert refused.classes == {"y": ("a", "b")}
    with pytest.raises(DataError, match=r"column 'finding', row 1: label None .*incomplete: leave_out"):
        refused.read("finding")
    split = opened(tmp_path, targets={"y": "finding"}, incomplete="leave_out")
    assert split.read("finding").values.to_pylist() == [1, 0, 1, 0, 0]
    assert split.left_out == {"finding": 1}


def test_boolean_targets_have_two_classes(tmp_path: Path) -> None:
    written(tmp_path, marks=[[True], [False, True], [], [True], [False], [True]])
    split = opened(tmp_path, targets={"y": "ok", "m": "marks"})
    assert split.classes == {"y": ("false", "true"), "m": ("false", "true")}
    assert split.read("ok").values.to_pylist() == [1, 0, 1, 1, 0, 1]
    assert split.read("marks").values.to_pylist() == [[1], [0, 1], [], [1], [0], [1]]
    samples = assemble(opened(tmp_path, targets={"y": "ok"}), {"image": Pixels(size=8)}, context_of(tmp_path))
    assert samples.targets["y"].tolist() == [1, 0, 1, 1, 0, 1]


# ---- caches


def test_pixels_of_a_selection_are_not_those_of_the_whole(tmp_path: Path) -> None:
    written(tmp_path)
    context = context_of(tmp_path)
    shades = {}
    for name, settings in {
        "whole": {},
        "italy": {"where": {"country": "Italy"}},
        "ok": {"where": {"ok": True}},
    }.items():
        inputs = Pixels(size=8).open(opened(tmp_path, **settings).modality("image"), "image", context)
        x = inputs(torch.arange(len(inputs)))
        shades[name] = ((x[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()
    assert shades == {"whole": [0, 40, 80, 120, 160, 200], "italy": [0, 80, 200], "ok": [0, 80, 120, 200]}


def test_the_same_items_share_their_cache_however_they_were_chosen(tmp_path: Path) -> None:
    written(tmp_path, text=["a", None, "c", "", "", "f"])
    stamps = [
        opened(tmp_path, **settings).modality("image").fingerprint
        for settings in (
            {"where": {"country": "Italy"}},
            {"incomplete": "leave_out"},
            {},
            {"where": {"ok": [True, False]}},
        )
    ]
    assert stamps[0] == stamps[1] != stamps[2] == stamps[3]


def test_features_of_a_selection_are_not_those_of_the_whole(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with quiet():
        ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8), add_pooling_layer=False).save_pretrained(
            tmp_path / "vit"
        )
    config = {"size": {"height": 16, "width": 16}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(config))
    context = DataContext(tmp_path / "cache", weights=tmp_path)
    written(tmp_path)
    view = Features(backbone="vit")
    whole = view.open(opened(tmp_path).modality("image"), "image", context)
    part = view.open(opened(tmp_path, where={"country": "Italy"}).modality("image"), "image", context)
    assert len(part) == 3
    torch.testing.assert_close(part(torch.arange(3)), whole(torch.tensor([0, 2, 5])))
