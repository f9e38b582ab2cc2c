"""Every method with half of the samples of image-text clients lacking one modality."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

import polyfed
from polyfed.data import samples as samples_module
from polyfed.data.samples import Inputs
from polyfed.runs.experiment import Experiment
from small_federations import METHODS, Config, federation_for, tiny_experiment

_filled = samples_module._filled


def poisoned(
    inputs: Inputs, rows: Int64[Tensor, " b"], there: Bool[Tensor, " b"], generator: torch.Generator | None
) -> Tensor:
    """What nobody may look at: where a modality is lacking NaN, or a number that no table has."""
    filled = _filled(inputs, rows, there, generator)
    poison = float("nan") if filled.is_floating_point() else torch.iinfo(filled.dtype).max
    return filled.clone().index_fill_(0, (~there).nonzero()[:, 0], poison)


def incomplete(config: Config, rate: float) -> Config | None:
    """The federation with modalities missing wherever a client has several; None if nobody has."""
    several = [group for group in config["clients"].values() if len(_encoders(group)) > 1 and "names" not in str(group)]
    for group in several:
        names = sorted(_encoders(group))
        group["missing"] = {"rates": dict.fromkeys(names, rate), "test": True}
    return config if several else None


def _encoders(group: Config) -> Config:
    return dict((group.get("models") or [group["model"]])[0]["encoders"])


@pytest.mark.parametrize("method", METHODS)
def test_what_a_sample_lacks_is_never_looked_at(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = incomplete(federation_for(method), 0.25)
    if config is None:
        pytest.skip("all clients have one modality")
    config["run"] |= {"rounds": 2, "eval_every": 2}
    config["aggregation"] = {"clip": None}
    monkeypatch.setattr(samples_module, "_filled", poisoned)
    run = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not run.records.events
    measured = [value for one in run.records.measurements for value in one.metrics.values()]
    assert measured
    assert all(value == value for value in measured)


def test_batches_without_a_pair_train_nothing(tmp_path: Path) -> None:
    config = incomplete(tiny_experiment(), 0.5)
    assert config is not None
    config["clients"] = {"paired": config["clients"]["paired"] | {"test_split": None, "count": 1}}
    config["clients"]["paired"]["missing"]["test"] = False
    config["run"]["rounds"] = 1
    federation = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not federation.records.events
    before, after = (federation.records.series("server", "r1_sum")[number] for number in (0, 1))
    assert before == after
