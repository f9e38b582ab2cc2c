"""The column of all kinds of participants, against their metrics by hand."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.columns.together import Together
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from small_federations import tiny_experiment

METRICS = {"server": ["image_to_text_r@1", "text_to_image_r@1"], "image": ["accuracy"], "elsewhere": ["dice"]}
ON_VALIDATION = ["clients.image.test_split=validation"]


def test_a_choice_never_sees_test_samples_of_clients(tmp_path: Path) -> None:
    column = Together(metrics=METRICS, kind="validation")
    column.require(Experiment.load(tiny_experiment(), ON_VALIDATION))
    with pytest.raises(ConfigError, match=r"clients\.image\.test_split is test; set another"):
        column.require(Experiment.load(tiny_experiment()))


def test_what_no_participant_has_is_named() -> None:
    experiment = Experiment.load(tiny_experiment(), ON_VALIDATION)
    with pytest.raises(ConfigError, match="the run has none of elsewhere"):
        Together(metrics={"elsewhere": ["dice"]}).require(experiment)
    with pytest.raises(ConfigError, match="metric: 'server' has no 'accuracy'"):
        Together(metrics={"server": ["accuracy"]}).require(experiment)


@pytest.mark.parametrize("kind", ["test", "validation"])
def test_each_kind_of_participant_counts_alike(finished: Run, kind: str) -> None:
    records = finished.records
    server = fmean(records.last("server", kind)[name] for name in METRICS["server"])
    clients = fmean(records.last(client)["accuracy"] for client in records.groups["image"])
    column = Together.model_validate({"metrics": METRICS, "kind": kind})
    column.require(finished.experiment)
    assert column.measure(finished) == pytest.approx((server + clients) / 2)
