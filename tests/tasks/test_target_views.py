"""A task of one's own whose targets are loaded with each batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyfed import Experiment, run
from polyfed.data.samples import Batch, Samples
from polyfed.data.view import View
from polyfed.data.views.pixels import Masks
from polyfed.models.model import Embedder
from polyfed.tasks import evaluating
from polyfed.tasks.task import Task


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
