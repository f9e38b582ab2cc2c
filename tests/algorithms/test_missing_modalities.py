"""Every method with half of the samples of image-text clients lacking one modality."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import Bool
from torch import Tensor

import polyfed
from grids import mostly_slow
from misbehaving import contents
from polyfed.data.samples import Inputs, Samples
from polyfed.runs.experiment import Experiment
from polyfed.tasks.imputations import Imputation
from sessions import prepared, woken
from small_federations import METHODS, Config, federation_for, tiny_experiment

loaded = Samples._loaded


def poisoned(
    samples: Samples, inputs: Inputs, rows: Tensor, generator: torch.Generator | None, there: Bool[Tensor, " b"]
) -> Tensor:
    """Inputs that must not be read: NaN in place of a missing modality, or a number that no table has."""
    filled = loaded(samples, inputs, rows, generator, there)
    assert isinstance(filled, Tensor)
    poison = float("nan") if filled.is_floating_point() else torch.iinfo(filled.dtype).max
    return filled.clone().index_fill_(0, (~there).nonzero()[:, 0], poison)


def incomplete(config: Config, rate: float) -> Config | None:
    """The federation with modalities missing wherever a client has several; None if no client has."""
    several = [group for group in config["clients"].values() if len(_encoders(group)) > 1 and "names" not in str(group)]
    for group in several:
        group["missing"] = {"rates": dict.fromkeys(sorted(_encoders(group)), rate), "test": True}
    return config if several else None


def _encoders(group: Config) -> Config:
    return dict((group.get("models") or [group["model"]])[0]["encoders"])


ALIKE = {"fedit", "ffa_lora", "fedex_lora", "flora", "flexlora", "hetlora", "fediot", "fedprox"}
ALIKE |= {"margin_weighted", "fedgems", "fedmkd", "fedet", "fedmd", "server_only", "local", "centralised"}
ALIKE |= {"change_distillation", "creamfl_averaged", "fed_mae", "feddra", "fedema", "fedcola", "moon", "scaffold"}
"""Slow: what clients do with their own samples is what others do."""


@pytest.mark.parametrize("method", mostly_slow(METHODS, *{*METHODS} - ALIKE))
def test_what_a_sample_lacks_is_never_looked_at(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = incomplete(federation_for(method), 0.25)
    if config is None:
        pytest.skip("all clients have one modality")
    config["run"] |= {"rounds": 2, "eval_every": 2}
    monkeypatch.setattr(Samples, "_loaded", poisoned)
    run = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not run.records.events
    measured = [value for one in run.records.measurements for value in one.metrics.values()]
    assert measured
    assert all(math.isfinite(value) for value in measured)


def classifying(**task: object) -> Config:
    """Clients that classify an image and its text by topic, of whose samples most lack one of the two."""
    config = tiny_experiment()
    paired = config["clients"]["paired"] | {"task": {"name": "classification", "target": "label"} | task}
    config["clients"] = {"paired": paired | {"missing": {"rates": {"image": 0.4, "text": 0.4}, "test": True}}}
    config["data"]["sources"]["scenes"]["targets"] = {"label": "label"}
    config["run"] |= {"rounds": 2, "eval_every": 2}
    return config | {"server": None}


@pytest.mark.parametrize("imputation", mostly_slow(Imputation.available(), "nearest"))
def test_every_imputation_trains_and_is_averaged_alike_on_a_wire(
    imputation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = classifying(imputation={"name": imputation, "dropout": 0.3}, given="each")
    monkeypatch.setattr(Samples, "_loaded", poisoned)
    run = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not run.records.events
    assert {"accuracy", "accuracy_given_image", "accuracy_given_text"} <= run.records.last("paired-0").keys()
    config["run"]["engine"] = {"name": "local", "serialize": True}
    assert contents(run) == contents(polyfed.run(Experiment.parse(config), tmp_path / "again", quiet=True))


def noised(imputation: str) -> Config:
    config = classifying(imputation=imputation)
    config["clients"]["paired"]["model"]["encoders"]["image"]["norm"] = "group"
    config["privacy"] = {"samples": {"noise_multiplier": 1.0, "clip": 1.0}, "metrics": "clear"}
    return config


@pytest.mark.slow
@pytest.mark.parametrize("imputation", ["drop", "placeholder"])
def test_noise_in_training_holds_for_samples_that_lack_something(imputation: str, tmp_path: Path) -> None:
    run = polyfed.run(Experiment.parse(noised(imputation)), tmp_path / "run", quiet=True)
    assert not [event for event in run.records.events if "privacy" not in event.incident]


def test_a_modality_that_one_sample_of_a_batch_has_is_left_out(tmp_path: Path) -> None:
    client = woken(prepared(classifying(), tmp_path / "run"), "paired-0")
    pictures = torch.full_like(client.train.rows["image"], -1).index_fill_(0, torch.tensor([3]), 0)
    few = replace(client.train, rows={"image": pictures, "text": client.train.rows["text"].clamp(min=0)})
    client.model.encoders["image"] = torch.nn.BatchNorm1d(3)  # of a single row it would not be defined
    for batch in client.batches(few, "task", len(few)):
        assert not bool(batch.present["image"].any())
        assert bool(client.task_loss(batch).isfinite())


def test_a_batch_without_a_pair_has_a_loss_of_zero_and_trains_nothing(tmp_path: Path) -> None:
    client = woken(prepared(tiny_experiment(), tmp_path / "run"), "paired-0")
    items = client.train.items.unique()
    half = len(items) // 2
    apart = client.train.lacking({"image": items[:half], "text": items[half:]})
    loss = client.task_loss(apart.batch(torch.arange(len(apart))))
    assert (float(loss), loss.requires_grad) == (0.0, False)
    before = {name: value.clone() for name, value in client.weights.items()}
    for _ in client.epochs(1):
        client.trainer().step(loss)
        with pytest.raises(RuntimeError, match="does not require grad"):
            client.trainer().step(loss + 1)
    assert all(torch.equal(value, before[name]) for name, value in client.weights.items())
