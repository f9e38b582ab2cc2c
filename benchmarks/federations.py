"""Federations that cost nothing but training: random images and words, small models, passing sessions."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from polyfed.data.source import Column, Source, Split
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.pixels import Pixels
from polyfed.engines.local import LocalEngine
from polyfed.federation.state import flatten, unflatten
from polyfed.models.encoder import Encoder
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.loop import Loop
from polyfed.runs.session import Session

SIDE, CLASSES, WORDS = 16, 10, 200


class Noise(Source):
    """Random images with random labels and captions: made in no time, and as good as any for a benchmark."""

    count: int = Field(default=1000, ge=1, description="items of each split")

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Split of random items; test items differ from those of training."""
        draw = np.random.default_rng([self.count, *split.encode()])
        values = {
            "image": pa.array([{"bytes": _image(draw)} for _ in range(self.count)]),
            "text": pa.array([[_caption(draw)] for _ in range(self.count)]),
            "label": pa.array(draw.integers(CLASSES, size=self.count)),
        }
        columns = {
            key: Column(pa.chunked_array([value]), f"noise-{self.count}-{split}-{key}", key)
            for key, value in values.items()
        }
        ids = [f"{self.count}-{split}-{row}" for row in range(self.count)]
        modalities = {"image": "image", "text": "text"}
        names = {"label": tuple(map(str, range(CLASSES)))}
        return Split(name, split, ids, modalities, {"label": "label"}, names, columns.__getitem__)


def _image(draw: np.random.Generator) -> bytes:
    stream = io.BytesIO()
    pixels = draw.integers(256, size=(SIDE, SIDE, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, format="png", compress_level=0)
    return stream.getvalue()


def _caption(draw: np.random.Generator) -> str:
    return " ".join(f"w{word}" for word in draw.integers(WORDS, size=8))


class Perceptron(Encoder):
    """Pixels to an embedding through one hidden layer: nearly all of the cost of a step is in its products."""

    view: View = Pixels(size=SIDE)
    hidden: int = Field(default=64, ge=1, description="width of the hidden layer")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps images [b, 3, side, side] to [b, dim]."""
        width = int(np.prod(spec.shape))
        return nn.Sequential(nn.Flatten(), nn.Linear(width, self.hidden), nn.ReLU(), nn.Linear(self.hidden, dim))


def image_model(dim: int, hidden: int) -> dict[str, Any]:
    """Settings of a model with a perceptron."""
    return {"dim": dim, "encoders": {"image": Perceptron(hidden=hidden)}}


def classification(
    sources: Mapping[str, Any], group: Mapping[str, Any], training: Mapping[str, Any], algorithm: Any
) -> dict[str, Any]:
    """An experiment of one group of classifying clients on the one source, whose timed rounds evaluate nothing."""
    (source,) = sources
    run = {"rounds": 1000, "eval_every": 1000, "seed": 0, "threads": torch.get_num_threads(), "device": "cpu"}
    client = {"source": source, "task": "classification", "training": dict(training), **group}
    return {
        "name": "benchmark",
        "data": {"sources": dict(sources)},
        "clients": {"client": client},
        "algorithm": algorithm,
        "run": run | {"output": {"plots": False}},
    }


@contextmanager
def prepared(content: Mapping[str, Any]) -> Iterator[Session]:
    """A session before its first round, in a folder that vanishes."""
    with tempfile.TemporaryDirectory() as path:
        data = {**content["data"], "cache_dir": f"{path}/cache"}
        experiment = Experiment.parse({**content, "data": data})
        with RunFolder.create(Path(path) / "run") as folder:
            session = Session(experiment, folder, "a-benchmark")
            session.attach(LocalEngine(session.hosting.here()))
            yield session


def global_weights(session: Session) -> Mapping[str, Tensor]:
    """Weights of the one global model of a session whose clients are of one type."""
    (weights,) = session.server.weights.values()
    return weights


def rounds_of(loop: Loop, rounds: int) -> Callable[[], None]:
    """Work of so many rounds from the initial weights."""
    loop.experiment.algorithm.setup(loop.server)
    initial = {name: value.clone() for name, value in flatten(loop.server.snapshot()).items()}

    def work() -> None:
        loop.server.restore(0, unflatten({name: value.clone() for name, value in initial.items()}))
        for number in range(1, rounds + 1):
            loop.round(number)

    return work
