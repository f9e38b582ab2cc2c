"""Settings without effect are refused, and what a preset sets in vain is left out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from polyfed.core.errors import ConfigError
from polyfed.core.settings import parse_settings
from polyfed.models.aligner import AlignerSettings
from polyfed.optim.settings import OptimizerSettings, Schedule
from polyfed.privacy.settings import PrivacySettings
from polyfed.runs.experiment import Experiment
from polyfed.tasks.classification import Classification
from polyfed.tasks.retrieval import PairRetrieval

Config = dict[str, Any]


@pytest.mark.parametrize(
    ("settings_class", "settings"),
    [
        (OptimizerSettings, {"kind": "sgd", "momentum": 0.5}),
        (OptimizerSettings, {"kind": "sgd", "betas": [0.9, 0.999]}),  # the default, written out
        (Schedule, {"kind": "exponential", "unit": "epoch"}),
        (PairRetrieval, {"objective": "info_nce", "learn_temperature": False}),
    ],
)
def test_settings_with_an_effect_are_taken(settings_class: Any, settings: Config) -> None:
    seen = settings_class(**settings)
    assert settings_class.model_validate(seen.model_dump(mode="json")) == seen  # as a run folder has it


@pytest.mark.parametrize(
    ("settings_class", "settings", "message"),
    [
        (OptimizerSettings, {"kind": "sgd", "eps": 0.1}, "eps has no effect with kind: sgd; it is 0.1: leave it at"),
        (OptimizerSettings, {"kind": "adam", "momentum": 0.5}, "momentum has no effect with kind: adam"),
        (Schedule, {"kind": "steps", "t_max": 3}, "t_max has no effect with kind: steps; it is 3: leave it at null"),
        (PairRetrieval, {"temperature": 0.1}, "temperature has no effect with objective: soft_contrastive"),
        (Classification, {"scale": 2.0}, "scale has no effect with non_negative: false"),
        (AlignerSettings, {"head": "linear", "hidden": 8}, "hidden has no effect with head: linear"),
        (PrivacySettings, {"reply": {"noise_multiplier": 1, "weights": 1, "votes": True}}, "votes has no effect with"),
    ],
)
def test_settings_without_effect_are_refused(settings_class: Any, settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_settings(settings_class, settings)


# ---- what surrounds settings


def test_a_schedule_by_epoch_needs_clients_that_count_epochs(tiny: Config) -> None:
    tiny["clients"]["image"]["training"] = {"schedule": {"kind": "exponential", "unit": "epoch"}}
    Experiment.parse(tiny)
    with pytest.raises(ConfigError, match=r"clients\.image\.training\.schedule\.unit has no effect without clients"):
        Experiment.parse(tiny | {"algorithm": {"name": "fedavg", "local_steps": 3}})
