"""Federations that cost nothing but training: random pictures and words, small models, and where to put a run."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from polyfed.data.source import Column, Source, Split
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.engines.local import LocalEngine
from polyfed.engines.site import Site
from polyfed.models.encoder import Encoder
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.session import Session

SIDE, CLASSES, WORDS = 16, 10, 200


class Noise(Source):
    """Random pictures with random labels and captions: made in no time, and to a benchmark as good as any."""

    count: int = Field(default=1000, ge=1, description="items of each split")
    side: int = Field(default=SIDE, ge=1, description="pixels of a side of the pictures")
    captions: int = Field(default=1, ge=1, description="captions an item")

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """A split; test items differ from those of training."""
        draw = np.random.default_rng([self.count, *split.encode()])
        values = {
            "image": pa.array([{"bytes": _picture(draw, self.side)} for _ in range(self.count)]),
            "text": pa.array([[_caption(draw) for _ in range(self.captions)] for _ in range(self.count)]),
            "label": pa.array(draw.integers(CLASSES, size=self.count)),
        }
        columns = {
            key: Column(pa.chunked_array([value]), f"noise-{self.count}-{self.captions}-{self.side}-{split}-{key}", key)
            for key, value in values.items()
        }
        ids = [f"{self.count}-{split}-{row}" for row in range(self.count)]
        modalities = {"image": "image", "text": "text"}
        names = {"label": tuple(map(str, range(CLASSES)))}
        return Split(name, split, ids, modalities, {"label": "label"}, names, columns.__getitem__)


def _picture(draw: np.random.Generator, side: int) -> bytes:
    stream = io.BytesIO()
    pixels = draw.integers(256, size=(side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, format="png", compress_level=0)
    return stream.getvalue()


def _caption(draw: np.random.Generator) -> str:
    return " ".join(f"w{word}" for word in draw.integers(WORDS, size=8))


class Perceptron(Encoder):
    """Pixels to an embedding through one hidden layer: what a step costs is nearly all in its products."""

    view: View = Pixels(size=SIDE)
    hidden: int = Field(default=64, ge=1, description="width of the hidden layer")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, 3, side, side] to [b, dim]."""
        width = int(np.prod(spec.shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(width, self.hidden), nn.ReLU(), nn.Linear(self.hidden, dim))


class LeNet(Encoder):
    """Two convolutions and two linear layers for pictures of 32 pixels, as tutorials on CIFAR have them."""

    view: View = Pixels(size=32)

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, 3, 32, 32] to [b, dim]."""
        convolutions = (nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, dim))


def image_model(dim: int, hidden: int) -> dict[str, Any]:
    """Settings of a model with a perceptron."""
    return {"dim": dim, "encoders": {"image": Perceptron(hidden=hidden)}}


@contextmanager
def prepared(content: Mapping[str, Any]) -> Iterator[Session]:
    """A session before its first round, in a folder that vanishes."""
    with tempfile.TemporaryDirectory() as place:
        data = {**content["data"], "cache_dir": f"{place}/cache"}
        experiment = Experiment.parse({**content, "data": data})
        with RunFolder.create(Path(place) / "run") as folder:
            session = Session(experiment, folder, "a-benchmark")
            session.attach(LocalEngine(session.hosting.here()))
            yield session


def global_weights(session: Session) -> Mapping[str, Tensor]:
    """The one global model of a session whose clients are of one type."""
    (weights,) = session.server.weights.values()
    return weights


def site_of(session: Session) -> Site:
    """Where the clients of a prepared session live."""
    assert isinstance(session.engine, LocalEngine)
    return session.engine.site
