"""Benches of downstream tests over generated data, and the outcomes of probes on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyfed.core.randomness import isolated
from polyfed.data.sources.scenes import Scenes
from polyfed.data.view import DataContext
from polyfed.federation.settings import DataSettings
from polyfed.lab.downstream.probe import Bench, FrozenModel, Outcome, Probe
from polyfed.models.model import ModelSettings

PIXELS = {"name": "pixels", "size": 16}
IMAGE = {"name": "resnet", "widths": [8, 12], "depths": [1, 1], "block": "basic", "stem": "medium", "view": PIXELS}
WORDS = {"name": "tokens", "length": 16, "tokenizer": {"name": "hashing", "size": 64}}
TEXT = {"name": "bag", "width": 8, "view": WORDS}
VIT = {"name": "blocks", "size": "nano", "depth": 1, "patch": 4, "view": PIXELS}


def bench_in(folder: Path, encoders: dict[str, Any] | None = None, draws: int | None = None, **sources: Any) -> Bench:
    """A bench with a random model over generated images and texts; further sources by keyword."""
    settings = ModelSettings.model_validate({"dim": 8, "encoders": encoders or {"image": IMAGE, "text": TEXT}})
    context = DataContext(folder / "cache")
    with isolated(0, "model"):
        model = settings.build({}, context)
    views = {name: encoder.view for name, encoder in settings.encoders.items()}
    targets = {"label": "label", "topic": "topic"}
    scenes = Scenes(train=40, validation=12, test=20, size=16, targets=targets, difficulty=0.0)
    data = DataSettings(cache_dir=folder / "cache", sources={"scenes": scenes, **sources})
    return Bench(FrozenModel("random", model, views, context, batch=16), data, draws=draws)


def outcome(probe: Probe, bench: Bench) -> Outcome:
    """Outcome of a suitable probe, checked and run as a suite does."""
    assert probe.unsuitable(bench) is None
    probe.check(bench, "task")
    return probe.run(bench, "task")


def values_of(result: Outcome) -> list[dict[str, list[float]]]:
    """Values of every row by metric."""
    return [{name: list(each) for name, each in row.values.items()} for row in result.rows]
