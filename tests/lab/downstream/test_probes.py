from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from probe_outcomes import outcome, values

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator
from polyfed.data.sources.scenes import Scenes
from polyfed.data.sources.stored import Parquet
from polyfed.lab.downstream.probe import Bench, Probe
from polyfed.lab.downstream.probes.classification import FewShot
from polyfed.lab.downstream.probes.retrieval import RetrievalProbe
from polyfed.lab.downstream.probes.segmentation import SegmentationProbe
from polyfed.models.towers import LocalFeatures

VIT = {"name": "blocks", "size": "nano", "depth": 1, "patch": 4, "view": {"name": "pixels", "size": 16}}
FEW = {"source": "scenes", "target": "topic", "shares": [0.1, 1.0], "draws": 2}
CUT = {"source": "scenes", "mask": "mask", "decoder": [8, 8], "fit": {"epochs": 2}, "draws": 2, "shares": [0.2, 1.0]}


# ---- few-shot


def test_few_shot_is_deterministic_and_says_how_many_it_used(make_bench: Any) -> None:
    bench = make_bench()
    before = {name: value.clone() for name, value in bench.subject.model.state_dict().items()}
    found = outcome(FewShot(**FEW), bench)
    again = outcome(FewShot(**FEW), make_bench())
    assert values(found) == values(again)
    assert all(torch.equal(value, before[name]) for name, value in bench.subject.model.state_dict().items())
    assert [row.on for row in found.rows] == ["10 %", "100 %"]
    labels = bench.labels("scenes", "train", "image", "topic")
    wanted = sum(max(1, round(0.1 * int(n))) for n in labels.bincount() if n)
    assert [row.facts["n"] for row in found.rows] == [wanted, 40]
    assert [row.facts["n_test"] for row in found.rows] == [20, 20]
    assert all(len(each) == 2 for each in values(found)[0].values())
    assert len(set(values(found)[0]["accuracy"] + values(found)[0]["auroc"])) > 1  # draws differ


def test_few_shot_computes_features_once(make_bench: Any) -> None:
    bench, seen = make_bench(), list[int]()
    bench.subject.trunk("image").register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    for target in ("topic", "label"):
        outcome(FewShot(**FEW | {"target": target, "shares": [0.1], "draws": 1}), bench)
    assert sum(seen) == 40 + 12 + 20


def test_few_shot_takes_the_trunk_or_where_there_is_none_the_embedding(make_bench: Any) -> None:
    bench = make_bench()
    bench.subject.model.encoders["bare"] = torch.nn.Identity()
    assert bench.kind("bare") == "embedding"
    probe = FewShot(**FEW | {"shares": [0.1], "draws": 1, "validation": None})
    assert "Features: trunk, width 12." in outcome(probe, bench).notes[0]


def test_few_shot_joins_sources_by_class_name(make_bench: Any) -> None:
    more = Scenes(train=30, validation=5, test=10, size=16, seed=3, targets={"topic": "topic"})
    found = outcome(FewShot(**FEW | {"source": ["scenes", "more"], "shares": [1.0], "draws": 1}), make_bench(more=more))
    assert (found.rows[-1].facts["n"], found.rows[-1].facts["n_test"]) == (70, 30)
    assert found.data == "scenes+more.topic"


def test_a_modality_that_the_model_lacks_is_no_error_but_a_reason(make_bench: Any) -> None:
    bench = make_bench({"image": VIT})
    assert FewShot(**FEW | {"modality": "text"}).unsuitable(bench) == "random encodes image, not 'text'"
    assert RetrievalProbe(source="scenes").unsuitable(bench) == "random encodes image, not 'text'"
    assert RetrievalProbe().unsuitable(bench) == "random has no clients; give a run, or a source to search"


# ---- segmentation


@pytest.mark.parametrize("encoder", ["resnet", "vit"])
def test_segmentation_freezes_the_encoder(make_bench: Any, encoder: str) -> None:
    bench = make_bench({"image": VIT} if encoder == "vit" else None)
    before = {name: value.clone() for name, value in bench.subject.model.state_dict().items()}
    found = outcome(SegmentationProbe(**CUT | {"draws": 1}), bench)
    after = bench.subject.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(value.requires_grad for value in bench.subject.model.parameters())
    assert [row.facts["n"] for row in found.rows] == [8, 40]
    assert found.notes[0].startswith("Decoder: grid 4." if encoder == "vit" else "Decoder: skips at 4, 8")
    for row in values(found):
        assert all(0 <= value <= 100 for each in row.values() for value in each)


@pytest.mark.parametrize("settings", [{}, {"validation": 0.25, "test": ["validation", "test"]}, {"validation": None}])
def test_segmentation_is_deterministic_whether_maps_are_held_or_not(make_bench: Any, settings: Any) -> None:
    held = outcome(SegmentationProbe(**CUT | {"draws": 1} | settings), make_bench())
    fresh = outcome(SegmentationProbe(**CUT | {"draws": 1} | settings, memory=0), make_bench())
    assert values(held) == values(fresh)
    last = held.rows[-1].facts
    share = settings.get("validation") == 0.25
    assert (last["n"], last["n_test"]) == ((30, 32) if share else (40, 20))
    assert last.get("held_out") == (10 if share else None)


def test_the_baseline_is_the_mean_of_the_training_masks(make_bench: Any) -> None:
    bench = make_bench()
    found = outcome(SegmentationProbe(**CUT | {"shares": [1.0], "draws": 1}), bench)
    probe = SegmentationProbe(**CUT)
    reader = probe.feature_reader(bench, "task")
    train, test = (probe.split_pictures(bench, "task", [name], reader).masks.double() for name in ("train", "test"))
    guess = (train.mean(0) > 0.5).double()
    scores = [
        100 * (2 * (guess * mask).sum() / (guess.sum() + mask.sum())).item() if (guess + mask).sum() else 100.0
        for mask in test
    ]
    assert values(found)[0]["mean_mask"] == [pytest.approx(sum(scores) / len(scores))]


def test_segmentation_learns_more_than_the_mean_mask(make_bench: Any) -> None:
    bench = make_bench(many=Scenes(train=100, validation=10, test=20, size=16, difficulty=0.0))
    probe = SegmentationProbe(
        source="many", mask="mask", decoder=(16, 8), draws=1, shares=(1.0,), fit={"epochs": 6, "lr": 0.01}
    )
    (row,) = values(outcome(probe, bench))
    assert row["dice"][0] > row["mean_mask"][0] + 10


def test_masks_that_cannot_be_read_are_found_before_any_work(make_bench: Any, tmp_path: Path) -> None:
    """A column of bytes, two of which are a picture and one is none."""
    buffer = io.BytesIO()
    Image.new("L", (16, 16), 255).save(buffer, "PNG")
    pictures = [{"bytes": buffer.getvalue(), "path": None}] * 3
    good, damaged = pa.array([buffer.getvalue()] * 3), pa.array([buffer.getvalue()] * 2 + [b"no picture"])
    for name, masks in (("train", good), ("test", damaged)):
        table = pa.table({"image": pictures, "mask": masks})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    bench = make_bench(bytes=Parquet(path=str(tmp_path), columns={"image": "image"}))
    probe = SegmentationProbe(**CUT | {"source": "bytes", "validation": None})
    with pytest.raises(DataError, match=r"tasks\.task\.mask: .*test, column 'mask', row 2: not a readable image"):
        probe.check(bench, "task")
    probe.model_copy(update={"test": ("train",)}).check(bench, "task")


def test_an_encoder_without_positions_cannot_segment(make_bench: Any) -> None:
    bench = make_bench()
    bench.subject.model.encoders["image"] = torch.nn.Flatten()
    assert (
        SegmentationProbe(**CUT).unsuitable(bench) == "the encoder of 'image' (Flatten) gives no features by position"
    )


def test_words_are_no_grid(make_bench: Any) -> None:
    class Words(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> LocalFeatures:
            return LocalFeatures(x.mean((2, 3)), x[:, :, 0, :6].transpose(1, 2))

    bench = make_bench()
    bench.subject._trunks["image"] = Words()
    with pytest.raises(ConfigError, match="6 positions are no square grid"):
        SegmentationProbe(**CUT).check(bench, "task")


# ---- refusals

SETTINGS: list[tuple[type[Probe], dict[str, Any], str]] = [
    *[
        (FewShot, FEW | splits, "overlap; name different splits, or validation: null")
        for splits in ({"test": "train"}, {"test": "validation"}, {"validation": "train"})
    ],
    (FewShot, FEW | {"validation": None, "test": "train"}, "overlap"),
    (SegmentationProbe, CUT | {"test": ["validation", "test"]}, "overlap; give validation a share of train"),
    (SegmentationProbe, CUT | {"test": ["test", "test"]}, "overlap"),
    (SegmentationProbe, CUT | {"size": 7}, "greater than or equal to 8"),
    (SegmentationProbe, CUT | {"focal_weight": 0, "dice_weight": 0}, "both 0"),
    (RetrievalProbe, {"between": ["image", "image"]}, "names 'image' twice"),
    (RetrievalProbe, {"cutoffs": [1, 1]}, "different"),
    (RetrievalProbe, {"batch": 1}, "2"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), SETTINGS)
def test_settings_that_cannot_be(kind: type[Probe], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**settings)


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (FewShot(**FEW | {"source": "nothing"}), "no source 'nothing' in the suite or the run; valid: scenes"),
        (FewShot(**FEW | {"target": "lable"}), "has no target 'lable'; did you mean 'label'"),
        (FewShot(**FEW | {"train": "trian"}), "no split 'trian'; did you mean 'train'"),
        (FewShot(**FEW | {"modality": "sound"}), "source 'scenes' has no columns.sound"),
        (FewShot(**FEW | {"source": "single"}), "tasks.task: 'single' train has a single class of 'topic'"),
        (SegmentationProbe(**CUT | {"mask": "maks"}), "no column 'maks'; did you mean 'mask'"),
        (SegmentationProbe(**CUT | {"mask": "captions"}), "'captions' holds lists; one mask an item"),
        (SegmentationProbe(**CUT | {"mask": "label"}), "tasks.task.mask: 'label' of 'scenes' train holds int64"),
        (SegmentationProbe(**CUT | {"mask": "id"}), "tasks.task.mask: 'id' of 'scenes' train holds string"),
    ],
)
def test_probes_that_do_not_suit_their_data(make_bench: Any, probe: Probe, message: str) -> None:
    bench = make_bench(single=Scenes(train=1, validation=5, test=5, size=16, targets={"topic": "topic"}))
    with pytest.raises((ConfigError, DataError), match=message):
        probe.check(bench, "task")


# ---- all


def test_streams_depend_on_task_draw_and_purpose() -> None:
    bench = Bench.__new__(Bench)
    bench.seed = 42
    first = bench.stream("a", 1, "x").initial_seed()
    assert first == generator(43, "downstream", "a", "x").initial_seed()
    others = [bench.stream(*key).initial_seed() for key in [("b", 1, "x"), ("a", 2, "x"), ("a", 1, "y")]]
    assert len({first, *others}) == 4
