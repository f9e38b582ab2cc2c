"""Runs of clients that differ honestly."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyfed
from misbehaving import happened, lying
from polyfed import Experiment
from small_federations import Config


def unequal(config: Config, rounds: int = 2) -> Config:
    """Eight honest clients of which some have many times the samples of others."""
    config = lying(config, "huge", (), count=8)
    config["clients"]["image"]["partition"] = {"name": "quantity", "alpha": 0.5, "min_size": 4}
    config["data"]["sources"]["private"]["train"] = 600
    config["run"] |= {"rounds": rounds, "evaluate_clients": 1, "eval_every": rounds}
    return config


@pytest.mark.slow
def test_honest_clients_of_unequal_sizes_are_left_alone(tiny: Config, tmp_path: Path) -> None:
    config = unequal(tiny)
    bounded = polyfed.run(Experiment.parse(config), tmp_path / "bounded", quiet=True)
    free = polyfed.run(Experiment.parse(config | {"aggregation": {}}), tmp_path / "free", quiet=True)
    assert [what for what in happened(bounded) if what[2] != "weight_capped"] == []
    weightless = config | {"aggregation": {"clip": {}}}
    lengths_only = polyfed.run(Experiment.parse(weightless), tmp_path / "lengths", quiet=True)
    last = "checkpoints/round-000002.safetensors"
    assert (lengths_only.folder / last).read_bytes() == (free.folder / last).read_bytes()
