from __future__ import annotations

import math
from statistics import fmean

import pytest

from polyfed.reporting.client_spread import ClientSpread, client_spreads, lower_is_better, spreads_json
from polyfed.runs.records import RunRecords


def test_figures_are_those_of_the_definition():
    spread = ClientSpread("g", "accuracy", {"a": 70.0, "b": 40.0, "c": 40.0, "d": 90.0}, 5)
    assert (spread.mean, spread.worst, spread.worst_client, spread.best) == (60.0, 40.0, "b", 90.0)
    assert spread.disparity == 50.0
    assert spread.std == pytest.approx(math.sqrt((100 + 400 + 400 + 900) / 4))


def test_of_a_loss_the_highest_is_the_worst():
    spread = ClientSpread("g", "loss", {"a": 0.5, "b": 2.0}, 2)
    assert (spread.worst, spread.worst_client, spread.best, spread.disparity) == (2.0, "b", 0.5, 1.5)
    assert [lower_is_better(name) for name in ("loss", "test_loss", "lossless", "r1_sum")] == [True, True, False, False]


def test_one_client_and_none():
    one = ClientSpread("g", "accuracy", {"a": 3.0}, 1)
    assert (one.mean, one.worst, one.disparity, one.std) == (3.0, 3.0, 0.0, 0.0)
    none = ClientSpread("g", "accuracy", {}, 2)
    assert all(math.isnan(value) for value in (none.mean, none.worst, none.best, none.disparity, none.std))
    assert none.worst_client == ""


def test_adding_a_constant_moves_the_mean_and_keeps_the_disparity():
    values = {"a": 1.0, "b": 4.0, "c": 2.5}
    first = ClientSpread("g", "x", values, 3)
    second = ClientSpread("g", "x", {client: value + 10 for client, value in reversed(values.items())}, 3)
    assert second.mean == pytest.approx(first.mean + 10)
    assert (second.disparity, second.std) == pytest.approx((first.disparity, first.std))
    assert second.worst_client == first.worst_client == "a"


def test_every_group_and_metric_of_a_run(made_up_run):
    records = RunRecords.load(made_up_run)
    found = {(spread.group, spread.metric): spread for spread in client_spreads(records)}
    assert set(found) == {(group, name) for group, name in found if name in ("accuracy", "r1_sum", "loss")}
    assert {group for group, _ in found} == {"image", "text", "paired"}
    values = [records.last(client)["r1_sum"] for client in records.groups["paired"]]
    assert found["paired", "r1_sum"].mean == pytest.approx(fmean(values))
    content = spreads_json(records)
    assert content["test"]["paired"]["r1_sum"]["worst"] == min(values)
    assert set(content) == {"test"}
