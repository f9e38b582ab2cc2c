"""With norm clipping on, no honest client is clipped: every method, at the learning rates of its presets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from by_hand import play
from polyfed.privacy.rules import median_norm
from polyfed.runs.config_files import preset_names
from polyfed.runs.experiment import Experiment
from sessions import prepared, round_records
from small_federations import METHODS, Config, federation_for, participants, sized

SILENT = {"local", "server_only", "centralised"}
"""Methods whose clients send nothing, or are one."""


_preset = functools.cache(Experiment.read)


def preset_optimizers(method: str) -> Iterator[Config]:
    """The different optimizers of clients in the presets of a method."""
    known: list[Config] = []
    for experiment in map(_preset, preset_names()):
        groups = experiment.clients.values() if experiment.algorithm.component_name() == method else ()
        for optimizer in (group.training.optimizer.model_dump(mode="json") for group in groups):
            if optimizer not in known:
                known.append(optimizer)
                yield optimizer


def federations(method: str) -> Iterator[Config]:
    """Four clients of each group, with every optimizer of the method's presets, or the small federation's own."""
    optimizers = preset_optimizers(method)
    for optimizer in itertools.chain([next(optimizers, {})], optimizers):
        config = sized(federation_for(method), 64)
        for clients in config["clients"].values():
            clients["count"] = 4
            clients.pop("items", None)
            clients.pop("partition", None)  # who has ten times the data may come farther than four medians
        for participant in participants(config):
            participant["training"]["optimizer"] = optimizer or participant["training"]["optimizer"]
        config["aggregation"] = {"clip": {"times": 4}}
        yield config


@pytest.mark.parametrize(
    ("method", "most"),
    [("fedavg", 1), *(pytest.param(name, None, marks=pytest.mark.slow) for name in METHODS if name not in SILENT)],
)
def test_no_honest_client_is_clipped(method: str, most: int | None, tmp_path: Path) -> None:
    for k, config in enumerate(itertools.islice(federations(method), most)):
        session = prepared(config, tmp_path / str(k))
        for number in (1, 2):
            play(session, number, number)
            notes = [record for record in round_records(session) if record["kind"] == "event"]
            assert notes == [], config["clients"]
        assert any(median_norm(norms.values()) for norms in session.cohorts.recent_norms.values())
