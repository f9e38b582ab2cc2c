"""Masks by a decoder on a frozen encoder: the maps it reads, its training, and what it refuses."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from papers.fedaid.segmentation import DecoderFit, MapReader, SegmentationProbe, fit_decoder
from PIL import Image
from torch import Tensor, nn

from benches import VIT, outcome, values_of
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.sources.scenes import Scenes
from polyfed.data.sources.stored import Parquet
from polyfed.data.view import DataContext
from polyfed.lab.downstream.probe import FrozenModel
from polyfed.models.decoders import UNetDecoder
from polyfed.models.model import ModelSettings
from polyfed.models.towers import LocalFeatures

CUT = {"source": "scenes", "mask": "mask", "decoder": [8, 8], "fit": {"epochs": 2}, "draws": 2, "shares": [0.2, 1.0]}


def test_a_convolutional_network_gives_every_resolution(tmp_path: Path) -> None:
    image = {"name": "resnet", "widths": [8, 12, 16], "depths": [1, 1, 1], "stem": "medium"}
    image["view"] = {"name": "pixels", "size": 64}
    settings = ModelSettings.model_validate({"dim": 8, "encoders": {"image": image}})
    context = DataContext(tmp_path)
    frozen = FrozenModel("random", settings.build({}, context), {"image": settings.encoders["image"].view}, context)
    trunk = frozen.trunk("image")
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    reader = MapReader.of(trunk, x[:1], "test")
    maps = reader(x)
    assert reader.sides == tuple(value.shape[2] for value in maps) == (8, 16, 32)
    torch.testing.assert_close(maps[0].flatten(2).transpose(1, 2), trunk(x).local)
    decoder = reader.decoder((8, 4), 64)
    assert isinstance(decoder, UNetDecoder)
    assert decoder(maps).shape == (2, 1, 64, 64)
    assert not any(module._forward_hooks for module in trunk.modules())


# ---- training


class Images:
    """Images whose maps and masks are one number."""

    def maps(self, index: Tensor) -> Tensor:
        return torch.zeros(len(index), 1)

    def truth(self, index: Tensor) -> Tensor:
        return torch.zeros(len(index))


@pytest.mark.parametrize(
    ("values", "epochs", "kept"), [([3.0, 1.0, math.nan, 0.5, 0.7, 0.5], 6, 4), ([2.0, 1.0], 2, 2)]
)
def test_stopping_keeps_the_lowest_and_waits_its_patience(values: list[float], epochs: int, kept: int) -> None:
    layer, seen = nn.Linear(1, 1), [0]
    losses: Iterator[float] = iter(values + [9.0] * 9)

    def validation() -> float:
        seen[0] += 1
        nn.init.constant_(layer.weight, seen[0])
        return next(losses)

    def fitted(watch: object, most: int) -> None:
        fit = DecoderFit(lr=1e-9, weight_decay=0.0, epochs=most, patience=2, batch_size=2)
        stream = torch.Generator().manual_seed(0)
        fit_decoder(layer, Images(), torch.arange(2), watch, lambda x, _: x.sum(), fit, stream)  # type: ignore[arg-type]

    fitted(validation, max(epochs, len(values)))
    assert (seen[0], round(layer.weight.item())) == (epochs, kept)
    fitted(None, 3)
    assert round(layer.weight.item()) == kept  # without validation the last state stays


@pytest.mark.parametrize("encoder", ["resnet", "vit"])
def test_segmentation_freezes_the_encoder(make_bench: Any, encoder: str) -> None:
    bench = make_bench({"image": VIT} if encoder == "vit" else None)
    before = {name: value.clone() for name, value in bench.subject.model.state_dict().items()}
    result = outcome(SegmentationProbe(**CUT | {"draws": 1}), bench)
    after = bench.subject.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(value.requires_grad for value in bench.subject.model.parameters())
    assert [row.facts["n"] for row in result.rows] == [8, 40]
    assert result.notes[0].startswith("Decoder: grid 4." if encoder == "vit" else "Decoder: skips at 4, 8")
    for row in values_of(result):
        assert all(0 <= value <= 100 for each in row.values() for value in each)


@pytest.mark.parametrize("settings", [{}, {"validation": 0.25, "test": ["validation", "test"]}, {"validation": None}])
def test_segmentation_is_deterministic_whether_maps_are_held_or_not(make_bench: Any, settings: Any) -> None:
    held = outcome(SegmentationProbe(**CUT | {"draws": 1} | settings), make_bench())
    fresh = outcome(SegmentationProbe(**CUT | {"draws": 1} | settings, memory=0), make_bench())
    assert values_of(held) == values_of(fresh)
    last = held.rows[-1].facts
    share = settings.get("validation") == 0.25
    assert (last["n"], last["n_test"]) == ((30, 32) if share else (40, 20))
    assert last.get("held_out") == (10 if share else None)


def test_the_baseline_is_the_mean_of_the_training_masks(make_bench: Any) -> None:
    bench = make_bench()
    result = outcome(SegmentationProbe(**CUT | {"shares": [1.0], "draws": 1}), bench)
    probe = SegmentationProbe(**CUT)
    reader = probe.feature_reader(bench, "task")
    train, test = (probe.split_images(bench, "task", [name], reader).masks.double() for name in ("train", "test"))
    guess = (train.mean(0) > 0.5).double()
    both = [(2 * (guess * mask).sum().item(), (guess.sum() + mask.sum()).item()) for mask in test]
    scores = [100 * common / total if total else 100.0 for common, total in both]
    assert values_of(result)[0]["mean_mask"] == [pytest.approx(sum(scores) / len(scores))]


def test_segmentation_learns_more_than_the_mean_mask(make_bench: Any) -> None:
    bench = make_bench(many=Scenes(train=100, validation=10, test=20, size=16, difficulty=0.0))
    fit = {"epochs": 6, "lr": 0.01}
    probe = SegmentationProbe(source="many", mask="mask", decoder=(16, 8), draws=1, shares=(1.0,), fit=fit)
    (row,) = values_of(outcome(probe, bench))
    assert row["dice"][0] > row["mean_mask"][0] + 10


def test_masks_that_cannot_be_read_are_found_before_any_work(make_bench: Any, tmp_path: Path) -> None:
    """A column of bytes, two of which are an image and one is not."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), 255).save(buffer, "PNG")
    pictures = [{"bytes": buffer.getvalue(), "path": None}] * 3
    good, damaged = pa.array([buffer.getvalue()] * 3), pa.array([buffer.getvalue()] * 2 + [b"no image"])
    for name, masks in (("train", good), ("test", damaged)):
        pq.write_table(pa.table({"image": pictures, "mask": masks}), tmp_path / f"{name}.parquet")
    bench = make_bench(bytes=Parquet(path=str(tmp_path), columns={"image": "image"}))
    probe = SegmentationProbe(**CUT | {"source": "bytes", "validation": None})
    with pytest.raises(DataError, match=r"tasks\.task\.mask: .*test, column 'mask', row 2: not a readable image"):
        probe.check(bench, "task")
    probe.model_copy(update={"test": ("train",)}).check(bench, "task")


def test_an_encoder_without_positions_cannot_segment(make_bench: Any) -> None:
    bench = make_bench()
    bench.subject.model.encoders["image"] = torch.nn.Flatten()
    reason = SegmentationProbe(**CUT).unsuitable(bench)
    assert reason == "the encoder of 'image' (Flatten) gives no features by position"


def test_words_are_not_a_grid(make_bench: Any) -> None:
    class Words(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> LocalFeatures:
            return LocalFeatures(x.mean((2, 3)), x[:, :, 0, :6].transpose(1, 2))

    bench = make_bench()
    bench.subject._trunks["image"] = Words()
    with pytest.raises(ConfigError, match="6 positions are not a square grid"):
        SegmentationProbe(**CUT).check(bench, "task")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": ["validation", "test"]}, "overlap; give validation a share of train"),
        ({"test": ["test", "test"]}, "overlap"),
        ({"size": 7}, "greater than or equal to 8"),
        ({"focal_weight": 0, "dice_weight": 0}, "both 0"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SegmentationProbe(**CUT | changes)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("maks", "no column 'maks'; did you mean 'mask'"),
        ("captions", "'captions' holds lists; one mask an item"),
        ("label", "tasks.task.mask: 'label' of 'scenes' train holds int64"),
        ("id", "tasks.task.mask: 'id' of 'scenes' train holds string"),
    ],
)
def test_columns_that_hold_no_masks(make_bench: Any, mask: str, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        SegmentationProbe(**CUT | {"mask": mask}).check(make_bench(), "task")
