"""Samples over plain tensors, and models small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polyfed.data.samples import Samples
from polyfed.models.model import Model


class TensorInputs:
    """Rows of a tensor; counts how often each row was asked for, and in which view."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.asked: list[int] = []
        self.training_views = 0

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        self.asked += rows.tolist()
        self.training_views += generator is not None
        return self.values[rows]


def make_samples(
    inputs: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    items: Tensor,
    targets: Mapping[str, Tensor] | None = None,
    classes: Mapping[str, tuple[str, ...]] | None = None,
) -> Samples:
    return Samples(
        inputs={name: TensorInputs(values) for name, values in inputs.items()},
        rows=rows,
        items=items,
        targets=targets or {},
        ids=[f"item {number}" for number in range(int(items.max()) + 1 if len(items) else 0)],
        classes=classes or {},
    )


def captioned(pictures: int, captions: int, dim: int = 6, noise: float = 0.0, seed: int = 0) -> Samples:
    """Images with several captions each; without noise a caption equals its image."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(pictures, dim, generator=generator)
    items = torch.arange(pictures).repeat_interleave(captions)
    text = image[items] + noise * torch.randn(len(items), dim, generator=generator)
    return make_samples({"image": image, "text": text}, {"image": items, "text": torch.arange(len(items))}, items)


def identity_model(*modalities: str, dim: int = 6, heads: Mapping[str, nn.Module] | None = None) -> Model:
    encoders = {}
    for modality in modalities:
        encoders[modality] = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(encoders[modality].weight)
    return Model(encoders, heads or {}, dim)
