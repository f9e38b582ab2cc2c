"""What hand-worked rounds of methods for samples with gaps share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyfed.data.samples import Batch
from polyfed.models.model import Model
from small_federations import Config, incompletes, plain_sgd


def with_gaps(name: str, **algorithm: Any) -> Config:
    """``incompletes`` that a plain loop can follow: nothing random, and no statistics of batches."""
    config = plain_sgd(incompletes(name, **algorithm))
    for group in config["clients"].values():
        group["model"]["encoders"]["image"]["norm"] = "group"
    config["clients"]["paired"]["model"]["encoders"]["text"]["dropout"] = 0.0
    return config


def embedded(model: Model, batch: Batch) -> dict[str, dict[int, Tensor]]:
    """Modality -> place in the batch -> embedding, of the samples that have it."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, x in batch.inputs.items():
        there = batch.present.get(name, torch.ones(len(batch), dtype=torch.bool))
        places = there.nonzero()[:, 0]
        if len(places):
            found[name] = dict(zip(places.tolist(), model.embed(name, x[places]), strict=True))
    return found


def mean_of_present(z: dict[str, dict[int, Tensor]], k: int) -> Tensor:
    """What is classified of a sample, with imputation ``drop``."""
    return torch.stack([own[k] for own in z.values() if k in own]).mean(0)
