"""Federations of linear towers over fixed features, which closed-form digests are for."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.samples import Inputs
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.models.encoders.words import Bag
from small_federations import CAPTIONS, RETRIEVAL, Config, bag, experiment, plain, resnet, scenes, training, words


class RandomFeatures(View):
    """relu(W x) of the pixels x of a small image, W random and fixed: stands for a frozen backbone."""

    home_of: ClassVar[str] = "tests"
    width: int = 24
    backbone: int = 0

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """The features of all images."""
        pictures = Pixels(size=8).open(column, modality, context)
        pixels = pictures(torch.arange(len(pictures))).flatten(1)
        stream = torch.Generator().manual_seed(self.backbone)
        return _Rows(F.relu(pixels @ torch.randn(pixels.shape[1], self.width, generator=stream)) / 10)

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (width,)."""
        return InputSpec((self.width,))


class Observed(View):
    """M z_k + noise of item k, whose latent z_k comes of its text alone: what a good frozen backbone sees of it.

    Two sensors have matrices of their own, so that what they see can be matched only by what was learnt from pairs.
    """

    home_of: ClassVar[str] = "tests"
    width: int = 48
    sensor: int = 0
    latent: int = 24
    noise: float = 1.0

    def open(self, column: Column, modality: str, context: DataContext) -> Inputs:
        """The features of all texts."""
        matrix = torch.randn(self.latent, self.width, generator=torch.Generator().manual_seed(self.sensor))
        seeds = [zlib.crc32(text.encode()) for text in column.values.to_pylist()]
        latents, noise = ([self._drawn(seed + more, size) for seed in seeds] for more, size in self._draws)
        return _Rows(torch.stack(latents) @ matrix + self.noise * torch.stack(noise))

    @property
    def _draws(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (0, self.latent), (1 + self.sensor, self.width)

    def _drawn(self, seed: int, size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed))

    def spec(self, modality: str, context: DataContext) -> InputSpec:
        """Shape (width,)."""
        return InputSpec((self.width,))


@dataclass(frozen=True)
class _Rows:
    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __call__(self, rows: Int64[Tensor, " b"], generator: torch.Generator | None = None) -> Float[Tensor, "b f"]:
        return self.values[rows]


class UntrainedBag(Bag):
    """A bag of words whose embeddings are parameters that are not trained: they are exchanged as they are."""

    home_of: ClassVar[str] = "tests"

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Bag of words."""
        module = super().build(dim, spec, context)
        module.get_submodule("embedding").requires_grad_(False)
        return module


def projection(backbone: int = 0, width: int = 24, **more: Any) -> Config:
    view = {"name": "fixed_features.RandomFeatures", "backbone": backbone, "width": width}
    return {"name": "projection", "dropout": 0.3, "view": view} | more


def frozen_bag(width: int = 16) -> Config:
    return bag(words(16, 200), width) | {"freeze_embedding": True}


def linear(dim: int = 8, **algorithm: Any) -> Config:
    """Two paired clients with features of their own and one of texts; all are linear but the server's images."""
    descent = plain(0.5, 12)
    paired = {"source": "scenes", "task": RETRIEVAL | {"temperature": 0.5}, "training": descent}
    both = {"dim": dim, "encoders": {"image": projection(1), "text": frozen_bag()}}
    other = {"dim": dim, "encoders": {"image": projection(2, 20), "text": frozen_bag(12)}}
    server = {"dim": dim, "encoders": {"image": resnet(), "text": frozen_bag()}}
    text = {"source": "texts", "task": {"name": "classification", "target": "topic"}, "training": descent}
    texts = scenes(20, 6, 6, seed=2, columns={"text": "text"}, targets={"topic": "topic"})
    return experiment(
        "linear",
        {"scenes": scenes(60, 8, 12) | CAPTIONS, "texts": texts},
        {"name": "change_distillation", "local_epochs": 1, "warmup_rounds": 0} | algorithm,
        public={"source": "scenes", "items": 10, "per_item": 2},
        server=paired | {"model": server, "training": training("adam", 0.01, 12)},
        clients={
            "paired": {"count": 2, "models": [both, other], "items": 24} | paired,
            "text": {"count": 1, "model": {"dim": dim, "encoders": {"text": frozen_bag(14)}}} | text,
        },
    )


def latent(**algorithm: Any) -> Config:
    """A server with 16 pairs and many items without partner, and two clients with 200 pairs each, whose sensors are
    others but as good as its own."""
    task, adam = RETRIEVAL | {"temperature": 0.2}, training("adam", 0.02, 24)

    def model(first: int) -> Config:
        views = {"image": first, "text": first + 1}
        observed = {key: {"name": "fixed_features.Observed", "sensor": sensor} for key, sensor in views.items()}
        return {"dim": 24, "encoders": {key: {"name": "projection", "view": view} for key, view in observed.items()}}

    paired = {"source": "scenes", "task": task, "training": adam}
    config = experiment(
        "latent",
        {"scenes": scenes(616, 8, 100, columns={"image": "text", "text": "text"})},
        algorithm,
        public={"source": "scenes", "items": 16},
        server=paired | {"model": model(10), "training": training("adam", 0.02, 24)},
        clients={"paired": {"count": 2, "models": [model(20), model(30)], "items": 400} | paired},
    )
    if algorithm["name"] == "change_distillation":
        config["public"]["unpaired"] = {"image": 100, "text": 100}
    return config
