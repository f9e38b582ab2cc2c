"""Segmentation, and a task of one's own whose targets are loaded with each batch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_samples import TensorInputs, make_samples
from torch import Tensor, nn

import polyfed
from polyfed import Experiment, run
from polyfed.core.errors import ConfigError, PolyfedError
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import View
from polyfed.data.views.pixels import Masks
from polyfed.export.model import export_model
from polyfed.models.model import Embedder
from polyfed.models.towers import Positions
from polyfed.tasks import evaluating
from polyfed.tasks.metrics import TaskScores
from polyfed.tasks.segmentation import Segmentation
from polyfed.tasks.task import Task
from sessions import prepared
from small_federations import Config, experiment, federation_for, pixels, scenes, training

# ---- by hand


class Grid(nn.Module):
    """Positions are the input; one number for each position is the prediction there."""

    device = torch.device("cpu")

    def embed(self, modality: str, x: Tensor) -> Tensor:
        raise AssertionError("a mask needs positions alone")

    represent = embed

    def positions(self, modality: str, x: Tensor) -> Positions:
        return x, None


class Doubled(nn.Module):
    """Logits of 2 x 2 pixels from 2 x 2 positions of three numbers, as they are."""

    def forward(self, positions: Tensor) -> Tensor:
        return positions.transpose(1, 2).unflatten(2, (2, 2))


def pictures(logits: Tensor, masks: Tensor, items: Tensor | None = None) -> Samples:
    """Samples whose positions are given logits [n, 4, c]."""
    rows = torch.arange(len(logits))
    samples = make_samples({"image": logits}, {"image": rows, "mask": rows}, rows if items is None else items)
    return samples.__class__(**{**vars(samples), "lazy": {"mask": TensorInputs(masks)}})


def test_metrics_count_pixels_over_all_images() -> None:
    """Three images of 2 x 2 pixels, worked out by hand."""
    masks = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [2, 255]], [[0, 0], [0, 0]]], dtype=torch.uint8)
    logits = nn.functional.one_hot(torch.tensor([[0, 1, 1, 0], [0, 0, 2, 2], [1, 0, 0, 0]]), 4).float()
    task = Segmentation(names=("none", "a", "b", "c"), ignore=255)
    metrics = task.evaluate(Grid(), Doubled(), pictures(logits, masks), batch_size=2)
    # a: 2 of 3 + 3 pixels are both; b: 1 of 1 + 1; c is nowhere, and so in no mean
    assert metrics["dice_a"] == pytest.approx(100 * 4 / 6)
    assert metrics["iou_a"] == pytest.approx(100 * 2 / 4)
    assert metrics["dice_b"] == metrics["iou_b"] == 100
    assert metrics["dice_none"] == pytest.approx(100 * 2 * 6 / (7 + 7))
    assert {"dice_c", "iou_c"}.isdisjoint(metrics)
    assert metrics["dice"] == pytest.approx((100 * 4 / 6 + 100) / 2)
    assert metrics["iou"] == pytest.approx(75)
    assert metrics["dice_of_constant"] == pytest.approx(100 * 2 * 3 / (11 + 3) / 2)
    assert (metrics["n"], metrics["classes"]) == (3, 4)
    assert set(metrics) <= set(task.metric_names)
    with_background = Segmentation(names=("none", "a", "b", "c"), ignore=255, background=True)
    other = with_background.evaluate(Grid(), Doubled(), pictures(logits, masks), batch_size=8)
    assert other["dice"] == pytest.approx((100 * 12 / 14 + 100 * 4 / 6 + 100) / 3)


def test_the_metrics_of_items_add_up_and_have_an_interval() -> None:
    stream = torch.Generator().manual_seed(0)
    masks = torch.randint(0, 3, (12, 2, 2), generator=stream, dtype=torch.uint8)
    samples = pictures(torch.randn(12, 4, 3, generator=stream), masks, torch.arange(12) // 2)
    metrics = Segmentation(names=("x", "y", "z")).evaluate(Grid(), Doubled(), samples, batch_size=5)
    assert isinstance(metrics, TaskScores)
    assert sum(float(s.sum() / c.sum()) for s, c in metrics.by_item["dice"]) == pytest.approx(metrics["dice"])
    low, high = metrics.intervals()["dice"]
    assert low < metrics["dice"] < high
    assert metrics["items"] == 6


def test_ties_and_nan_are_right_nowhere_and_empty_masks_want_nothing() -> None:
    full, empty = torch.ones(2, 2, 2, dtype=torch.uint8), torch.zeros(2, 2, 2, dtype=torch.uint8)
    task = Segmentation()
    for value in (0.0, math.nan):
        alike = torch.full((2, 4, 2), value)
        assert task.evaluate(Grid(), Doubled(), pictures(alike, full), batch_size=2)["dice"] == 0
    background = torch.tensor([1.0, 0.0]).expand(2, 4, 2)
    metrics = task.evaluate(Grid(), Doubled(), pictures(background, empty), batch_size=2)
    assert metrics["dice"] == metrics["dice_of_constant"] == 100


def test_samples_without_the_image_are_left_out() -> None:
    samples = pictures(torch.randn(3, 4, 2), torch.ones(3, 2, 2, dtype=torch.uint8))
    lacking = samples.__class__(**{**vars(samples), "rows": {**samples.rows, "image": torch.tensor([0, -1, 2])}})
    task, batch = Segmentation(), lacking.batch(torch.arange(3))
    expected = task.loss(Grid(), Doubled(), samples.batch(torch.tensor([0, 2])))
    torch.testing.assert_close(task.loss(Grid(), Doubled(), batch), expected)
    assert task.evaluate(Grid(), Doubled(), lacking, batch_size=2)["n"] == 2
    assert float(task.loss(Grid(), Doubled(), lacking.batch(torch.tensor([1])))) == 0


# ---- in federations


def segmenting(**changes: Any) -> Config:
    """Two clients and a server that segment with one small network."""
    network = {"name": "resnet", "widths": [12, 16], "depths": [1, 1], "norm": "group", "view": pixels()}
    model = {"dim": 16, "encoders": {"image": network | changes.pop("encoder", {})}}
    task = {"name": "segmentation", "widths": [12]} | changes.pop("task", {})
    participant = {"source": "scenes", "task": task, "model": model, "training": training("adam", 0.01, 16)}
    sources = {"scenes": scenes(48, 8, 16, difficulty=0.0, columns={"image": "image"}, targets={})}
    algorithm = changes.pop("algorithm", {"name": "fedavg", "local_epochs": 1})
    clients = {"image": participant | {"count": 2}}
    return experiment("segmenting", sources, algorithm, 1, server=participant, clients=clients) | changes


def test_a_federation_learns_masks(tmp_path: Path) -> None:
    config = segmenting(algorithm={"name": "fedavg", "local_epochs": 4})
    config["run"] |= {"rounds": 3, "evaluate_clients": 3}
    run = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    metrics = run.records.last("server")
    assert metrics["dice"] > metrics["dice_of_constant"] + 10
    assert run.records.last("image-0")["dice"] > 0


@pytest.mark.slow
def test_an_export_makes_the_masks_of_its_run(tmp_path: Path) -> None:
    polyfed.run(Experiment.parse(segmenting()), tmp_path / "run", quiet=True)
    folder = export_model(tmp_path / "run", tmp_path / "export", which="last")
    assert (folder / "image-classes.pt2").is_file()
    assert json.loads((folder / "config.json").read_text())["classes"] == ["background", "foreground"]
    shown = [np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8) for seed in range(3)]
    masks = polyfed.load_model(tmp_path / "run", which="last").segment(shown, batch=2)
    assert masks.shape == (3, 16, 16)
    assert polyfed.load_model(folder, allow_code=True).segment([]).shape == (0, 16, 16)
    assert (polyfed.load_model(folder, allow_code=True).segment(shown) == masks).all()
    with pytest.raises(ConfigError, match="has no encoder of texts"):
        polyfed.load_model(folder, allow_code=True).encode(texts="a")


def with_masks(method: str) -> Config:
    """The federation of a method, in which clients of images segment, or all where all are alike."""
    config = federation_for(method)
    groups = config["clients"]
    chosen = [groups["image"]] if "image" in groups else [*groups.values(), config["server"]]
    for participant in chosen:
        participant["task"] = {"name": "segmentation", "widths": [4]}
        if "aligner" in participant["model"]:
            participant["model"]["aligner"] |= {"local": True}
    config["run"] |= {"rounds": 1, "evaluate_clients": 1}
    if method == "fedafd":
        config["algorithm"]["fusion"] = {"level": "maps"}  # features by position
    return config


# weights, fused maps, align modules: other methods treat masks like any other task
@pytest.mark.parametrize("method", ["fedavg", "fedafd", pytest.param("feddra", marks=pytest.mark.slow)])
def test_every_kind_of_method_trains_it(method: str, tmp_path: Path) -> None:
    run = polyfed.run(Experiment.parse(with_masks(method)), tmp_path / "run", quiet=True)
    assert math.isfinite(run.records.last(next(iter(run.records.clients)))["dice"])


REFUSED: list[tuple[Config, str]] = [
    ({"task": {"names": ["a"]}}, "names"),
    ({"task": {"names": ["a", "a"]}}, "names must be unique"),
    ({"task": {"names": ["a b", "c"]}}, "names must be unique"),
    ({"task": {"names": ["a", "b", "c"], "threshold": 3}}, "threshold has no effect with more than two names"),
    ({"task": {"ignore": 255}}, "ignore has no effect with two names"),
    ({"task": {"names": ["a", "b", "c"], "ignore": 2}}, "ignore is 2, the number of class 'c'"),
    ({"task": {"widths": []}}, "widths"),
    ({"task": {"modality": "scan"}}, "needs 'scan', and the model there|masks of 'scan'"),
    ({"task": {"target": "outline"}}, "outline"),
    ({"task": {"size": 8}}, "have size 8, but its view is 'pixels', its size 16"),
    ({"task": {"names": ["a", "b", "c"]}}, "value 255, and there are 3 classes"),
    (
        {"encoder": {"stem": "large", "norm": "batch", "widths": [8] * 3, "depths": [1] * 3}},
        "gives 1 positions; choose",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_wrong_configurations_are_refused_before_any_work(changes: Config, message: str, tmp_path: Path) -> None:
    with pytest.raises(PolyfedError, match=message):
        prepared(segmenting(**copy.deepcopy(changes)), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- a task of one's own whose targets are loaded


class Coverage(Task):
    """Share of an image that its mask covers, from the image's embedding."""

    @property
    def primary(self) -> str:
        return "closeness"

    @property
    def target_views(self) -> Mapping[str, View]:
        return {"mask": Masks(of="image")}

    def head(self, dim: int, samples: Samples) -> nn.Module:
        return nn.Linear(dim, 1)

    def loss(self, model: Embedder, head: nn.Module | None, batch: Batch) -> Tensor:
        assert head is not None
        assert batch.targets["mask"].shape[1:] == batch.inputs["image"].shape[2:]
        share = batch.targets["mask"].float().mean((1, 2))
        return (head(model.embed("image", batch.inputs["image"]))[:, 0] - share).square().mean()

    def evaluate(
        self, model: Embedder, head: nn.Module | None, samples: Samples, *, batch_size: int
    ) -> dict[str, float]:
        with evaluating(model, head):
            return {"closeness": -float(self.loss(model, head, samples.batch(torch.arange(len(samples)))))}


def test_clients_learn_from_masks(tiny: dict[str, Any], tmp_path: Path) -> None:
    group = tiny["clients"]["image"]
    group["task"] = f"{__name__}.Coverage"
    group["model"]["encoders"]["image"]["view"] |= {"augment": {"crop": 0.5, "flip": True}}
    tiny["algorithm"] = {"name": "local", "local_epochs": 2}
    tiny["run"] |= {"rounds": 3, "evaluate_clients": True}
    curve = run(Experiment.load(tiny), tmp_path / "run", quiet=True).records.series("image", "closeness")
    assert curve[3] > curve[1]
