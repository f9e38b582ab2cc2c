from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed
from polyfed import Experiment
from polyfed.core.randomness import isolated
from polyfed.data.sources.scenes import Scenes
from polyfed.data.view import DataContext
from polyfed.federation.settings import DataSettings
from polyfed.lab.downstream.probe import Bench, FrozenModel
from polyfed.models.model import ModelSettings

Cli = Callable[..., tuple[int, str, str]]
MakeBench = Callable[..., Bench]

PIXELS = {"name": "pixels", "size": 16}
IMAGE = {"name": "resnet", "widths": [8, 12], "depths": [1, 1], "block": "basic", "stem": "medium", "view": PIXELS}
WORDS = {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing", "size": 64}}
TEXT = {"name": "bag", "width": 8, "view": WORDS}
VIT = {"name": "blocks", "size": "nano", "depth": 1, "patch": 4, "view": PIXELS}


@pytest.fixture
def make_bench(tmp_path: Path) -> MakeBench:
    """A bench with a random model over generated pictures and texts; further sources by keyword."""

    def make(encoders: dict[str, Any] | None = None, draws: int | None = None, **sources: Any) -> Bench:
        settings = ModelSettings.model_validate({"dim": 8, "encoders": encoders or {"image": IMAGE, "text": TEXT}})
        context = DataContext(tmp_path / "cache")
        with isolated(0, "model"):
            model = settings.build({}, context)
        views = {name: encoder.view for name, encoder in settings.encoders.items()}
        scenes = Scenes(
            train=40, validation=12, test=20, size=16, targets={"label": "label", "topic": "topic"}, difficulty=0.0
        )
        data = DataSettings(cache_dir=tmp_path / "cache", sources={"scenes": scenes, **sources})
        return Bench(FrozenModel("random", model, views, context, batch=16), data, draws=draws)

    return make


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """Runs ``polyfed downstream ...`` in an empty folder; gives exit code, output and errors."""
    return partial(cli, "downstream")


def _finished(tiny_run: Path, folder: Path, **changes: Any) -> Path:
    content = yaml.safe_load((tiny_run / "config.yaml").read_text()) | {"server": None} | changes
    return polyfed.run(Experiment.load(content), folder).folder


@pytest.fixture(scope="session")
def local_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of clients that keep their models, without a server; not to be changed."""
    return _finished(tiny_run, tmp_path_factory.mktemp("local") / "run", algorithm="local")


@pytest.fixture(scope="session")
def typed_run(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of FedAvg without a server model: the weights are those of types; likewise."""
    return _finished(tiny_run, tmp_path_factory.mktemp("typed") / "run")
