"""Gauges, against figures worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polyfed.core.settings import parse_settings
from polyfed.lab.studies.columns.gauges import Gauge, Recorded
from polyfed.lab.studies.columns.metrics import Metric
from polyfed.runs.events import Measured
from polyfed.runs.opened import Run
from polyfed.runs.records import RunRecords

TOLD = [{"loss.a": 1.0, "loss.b": 3.0, "w.a": 0.75, "w.b": 0.25, "t": 12.0, "s": 10.0}, {"loss.a": 2.0, "t": 9.0}]


@pytest.fixture
def told(finished: Run) -> Run:
    """A run whose server told of two rounds what ``TOLD`` has."""
    run = Run(finished.folder)
    lines = tuple(Measured(number, "server", "train", metrics) for number, metrics in enumerate(TOLD, 1))
    run.__dict__["records"] = RunRecords(finished.folder, measurements=lines)
    return run


@pytest.mark.parametrize(
    ("settings", "value"),
    [
        ({"metric": "loss.*"}, 2.0),  # (1 + 3) / 2, then 2
        ({"metric": "loss.*", "over": "spread"}, 25.0),  # 1 of 2, then 0
        ({"metric": "loss.*", "over": "spread", "round": "first"}, 50.0),
        ({"metric": "w.*", "over": "departure"}, 50.0),  # 0.75 and 0.25 are half an equal share away
        ({"metric": "t", "round": "last"}, 9.0),
    ],
)
def test_what_the_server_told(told: Run, settings: dict[str, Any], value: float) -> None:
    assert Recorded(**settings).measure(told) == pytest.approx(value)


def test_a_gauge_is_a_difference_that_words_do_not_identify(told: Run) -> None:
    content = {"shows": {"name": "recorded", "metric": "t"}, "minus": {"name": "recorded", "metric": "s"}}
    gauge = parse_settings(Gauge, {**content, "reads": "points", "below": 0.5, "then": "nothing is taught"})
    assert gauge.measure(told) == 10.5 - 10
    assert gauge.digest == Gauge(**content, reads="other words").digest
    assert gauge.digest != Gauge(shows=content["shows"], reads="points").digest
    assert [gauge.is_beyond(value) for value in (0.5, 0.6, math.nan)] == [True, False, False]
    assert gauge.in_words == "points; from 0.5 down nothing is taught"
    assert math.isnan(Gauge(shows={"name": "recorded", "metric": "none.*"}, reads="").measure(told))


def test_a_gauge_of_a_metric_is_that_metric(finished: Run) -> None:
    of_clients = Metric(metric="accuracy", of="image")
    gauge = Gauge(shows={"metric": "accuracy", "of": "image"}, reads="percent")
    assert gauge.measure(finished) == of_clients.measure(finished)
    assert not gauge.is_outcome
    assert not gauge.needs_models
