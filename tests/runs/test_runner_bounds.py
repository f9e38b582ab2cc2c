"""Runs of clients that differ honestly, and of one that is alone with its architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyfed
from misbehaving import happened, lying
from polyfed import Experiment
from polyfed.wire.ledger import Ledger
from sessions import prepared
from small_federations import Config


def unequal(config: Config, rounds: int = 2) -> Config:
    """Eight honest clients of which some have many times the samples of others."""
    config = lying(config, "huge", (), count=8)
    config["clients"]["image"]["partition"] = {"name": "quantity", "alpha": 0.5, "min_size": 4}
    config["data"]["sources"]["private"]["train"] = 600
    config["run"] |= {"rounds": rounds, "evaluate_clients": 1, "eval_every": rounds}
    return config


def moved_encoder(config: Config, folder: Path) -> float:
    """How far one round moves the encoder that is averaged over all types."""
    session = prepared(config, folder)
    before = {name: value.clone() for name, value in session.server.weights["image"].items()}
    session.experiment.algorithm.round(session.server, session.cohort(1, Ledger()))
    after = session.server.weights["image"]
    shared = [name for name, value in after.items() if name.startswith("encoders") and value.is_floating_point()]
    assert shared
    learned = [name for name in shared if not name.endswith(("running_mean", "running_var"))]
    return float(torch.cat([(after[name] - before[name]).flatten() for name in learned]).norm())


@pytest.mark.parametrize(("odd", "liars"), [(1, ("odd",)), (3, ("odd-0", "odd-1", "odd-2"))])
def test_an_architecture_of_its_own_frees_nobody(
    tiny: Config, tmp_path: Path, odd: int, liars: tuple[str, ...]
) -> None:
    def with_odd(names: tuple[str, ...]) -> Config:
        config = lying(tiny, "huge", names, count=6)
        config["clients"]["image"]["items"] = 96
        config["algorithm"] |= {"averaging": {"name": "by_slot", "layers": "encoder", "range": "modality"}}
        other = config["clients"]["image"] | {
            "count": odd,
            "items": 16 * odd,
            "task": {"name": "classification", "target": "tone"},
        }
        config["data"]["sources"]["private"] |= {"train": 96 + 16 * odd, "targets": {"label": "topic", "tone": "topic"}}
        return config | {"clients": config["clients"] | {"odd": other}}

    honest = moved_encoder(with_odd(()), tmp_path / "honest")
    lied = moved_encoder(with_odd(liars), tmp_path / "lied")
    assert lied < 20 * honest  # honest updates partly cancel in their mean, those of liars add up
    result = polyfed.run(Experiment.parse(with_odd(())), tmp_path / "run", quiet=True)
    assert happened(result) == []


@pytest.mark.slow
def test_honest_clients_of_unequal_sizes_are_left_alone(tiny: Config, tmp_path: Path) -> None:
    config = unequal(tiny)
    bounded = polyfed.run(Experiment.parse(config), tmp_path / "bounded", quiet=True)
    free = polyfed.run(Experiment.parse(config | {"aggregation": {"clip": None}}), tmp_path / "free", quiet=True)
    assert [what for what in happened(bounded) if what[2] != "weight_capped"] == []
    weightless = config | {"aggregation": {"clip": {"weight": None}}}
    lengths_only = polyfed.run(Experiment.parse(weightless), tmp_path / "lengths", quiet=True)
    last = "checkpoints/round-000002.safetensors"
    assert (lengths_only.folder / last).read_bytes() == (free.folder / last).read_bytes()
