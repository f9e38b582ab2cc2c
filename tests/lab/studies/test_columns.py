"""Columns of what clients hold and move and of all kinds of participants, against the records counted by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.core.settings import parse_settings
from polyfed.lab.analysis.cost import round_costs
from polyfed.lab.studies.columns import metrics
from polyfed.lab.studies.columns.costs import ClientTraffic, CostTo, CpuSeconds, Holdings, RoundCost
from polyfed.lab.studies.columns.metrics import Chance, Gauge, Metric, MetricAt, Recorded, TimeTo, Together
from polyfed.runs.events import Measured
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run, open_run
from polyfed.runs.records import PartitionEntry, RunRecords
from small_federations import tiny_experiment


def with_records(finished: Run, **records: Any) -> Run:
    """The run as if it had left these records."""
    run = Run(finished.folder)
    run.__dict__["records"] = RunRecords(finished.folder, **records)
    return run


def test_holdings_count_what_clients_hold(finished: Run) -> None:
    holdings = finished.records.holdings
    first, held = next(iter(holdings.items()))
    of_group = [each.items for each in holdings.values() if each.group == held.group]
    assert Holdings(of=first).measure(finished) == held.items
    assert Holdings(of=held.group).measure(finished) == max(of_group)
    assert Holdings(of=held.group, over="smallest").measure(finished) == min(of_group)
    with_classes = {client: each for client, each in holdings.items() if each.labels}
    for client, each in with_classes.items():
        label, number = next(iter((each.labels or {}).items()))
        assert Holdings(of=client, label=label).measure(finished) == number
        share = Holdings(of=client, label=label, share=True).measure(finished)
        assert share == pytest.approx(100 * number / each.items)
        with pytest.raises(ConfigError, match="label: no client holds 'none such'"):
            Holdings(of=client, label="none such").measure(finished)
    assert with_classes


def test_a_combination_of_columns_without_items_counts_zero(finished: Run) -> None:
    entry = PartitionEntry(
        group="h", source="s", split="train", items=3, samples=3, labels={"none": 1, "a+b": 2}, index=[0, 1, 2],
        columns={"a": {"1": 2}, "b": {"1": 2}},
    )  # fmt: skip
    run = with_records(finished, holdings={"h-0": entry})
    assert [Holdings(of="h", label=label).measure(run) for label in ("a+b", "a", "none")] == [2, 0, 1]
    with pytest.raises(ConfigError, match=r"label: no client holds '1'; .*none"):
        Holdings(of="h", label="1").measure(run)


def test_chance_is_that_of_the_same_test_items(finished: Run) -> None:
    last = finished.records.last
    assert Chance(metric="primary", of="image").measure(finished) == last("image")["accuracy_of_constant"] > 100 / 6
    assert Chance(metric="r1_sum", of="paired").measure(finished) == pytest.approx(100 / 12 + 100 * 5 / 60)
    assert Chance(metric="r1_sum").measure(finished) == pytest.approx(100 / 12 + 100 * 5 / 60)
    assert Chance(metric="r1_sum").digest != Metric(metric="r1_sum").digest


def test_a_point_of_a_curve_is_the_metric_of_that_round(finished: Run) -> None:
    lines = (Measured(number, "server", "test", {"r1_sum": value}) for number, value in enumerate((1.0, 5.0, 4.0)))
    run = with_records(finished, measurements=tuple(lines))
    assert [MetricAt(metric="r1_sum", at=number).measure(run) for number in (1, 2)] == [5.0, 4.0]
    assert math.isnan(MetricAt(metric="r1_sum", at=3).measure(run))
    with pytest.raises(ConfigError, match=r"at: 3, but run.rounds is 2"):
        MetricAt(metric="r1_sum", at=3).require(finished.experiment)


def test_how_a_figure_is_shown_and_judged_is_not_what_it_is() -> None:
    assert Metric(metric="r1_sum", lower=True, digits=1, effect=2).digest == Metric(metric="r1_sum").digest
    assert Metric(metric="r1_sum", round="best").digest != Metric(metric="r1_sum").digest


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_traffic_of_a_client_is_its_share_of_the_ledger(finished: Run, direction: Any) -> None:
    def by_hand(group: str) -> float:
        sums: dict[tuple[str, int], int] = {}
        for line in finished.records.transfers:
            own = line.client in finished.records.groups[group] and line.step.split(":")[0] not in ("evaluate", "setup")
            if own:
                key = line.client, line.round
                sums[key] = sums.get(key, 0) + (line.bytes if direction in (line.direction, "both") else 0)
        return fmean(sums.values()) / 2**20

    groups = list(finished.records.groups)
    assert by_hand(groups[0]) > 0
    for group in groups:
        assert ClientTraffic(groups=[group], direction=direction).measure(finished) == pytest.approx(by_hand(group))
    together = ClientTraffic(groups=groups, direction=direction).measure(finished)
    assert together == pytest.approx(sum(map(by_hand, groups)))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run: Holdings(of="pared").measure(run), "of: no client or group 'pared'; did you mean 'paired'"),
        (lambda run: Holdings(of="paired", column="age", value="1").measure(run), "column: the partition has no 'age'"),
        (lambda run: ClientTraffic(groups=["pared"]).require(run.experiment), "groups: no group 'pared'"),
        (lambda run: RoundCost(figure="flops", of="pared").require(run.experiment), "of: no group 'pared'"),
    ],
)
def test_what_a_run_has_not_is_named(finished: Run, ask: Callable[[Run], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask(finished)


def test_values_recorded_by_the_server_are_a_column(tmp_path: Path) -> None:
    changes = ["run.rounds=1", "run.output.plots=false", "algorithm={name: fedmd, local_epochs: 1}"]
    polyfed.run(Experiment.load(tiny_experiment(), changes), tmp_path / "run", quiet=True)
    run = open_run(tmp_path / "run")
    column = Metric(metric="senders.image", kind="train", round="final")
    column.require(run.experiment)
    assert column.measure(run) == 3
    with pytest.raises(ConfigError, match="of: 'paired' with kind: train, which the server alone has"):
        Metric(metric="senders.image", kind="train", of="paired")


@pytest.mark.slow
def test_cost_is_that_of_the_first_round(finished: Run) -> None:
    costs = {cost.kind: cost for cost in round_costs(finished.experiment).costs}
    for kind, cost in costs.items():
        assert RoundCost(figure="flops", of=kind).measure(finished) == pytest.approx(cost.flops / 1e6)
    assert costs["paired"].flops > 0
    assert RoundCost(figure="memory", of="paired").measure(finished) > 0
    of_clients = sum(cost.flops for kind, cost in costs.items() if kind != "server") / 1e6
    assert RoundCost(figure="flops", of="clients").measure(finished) == pytest.approx(of_clients)
    with pytest.raises(ConfigError, match="of: no client of 'pared' took part; did you mean 'paired'"):
        RoundCost(figure="flops", of="pared").measure(finished)


def test_virtual_seconds_until_a_metric_is_reached(finished: Run) -> None:
    measured = [Measured(number, "server", "test", {"r1_sum": 10.0 * number}) for number in (0, 1, 2)]
    measured += [Measured(number, "server", "pace", {"virtual_seconds": at}) for number, at in ((1, 2.5), (2, 4.0))]
    run = with_records(finished, measurements=tuple(measured))
    times = [TimeTo(metric="r1_sum", target=target).measure(run) for target in (0, 5, 10, 11, 21)]
    assert times[:4] == [0.0, 2.5, 2.5, 4.0]
    assert math.isnan(times[4])
    with pytest.raises(ConfigError, match=r"metric: no 'rsum' of a server .* r1_sum"):
        TimeTo(metric="rsum", target=1).measure(run)
    with pytest.raises(ConfigError, match=r"run.pace.clients is null, so that the run has no virtual time"):
        TimeTo(metric="r1_sum", target=1).require(run.experiment)


def test_costs_until_validation_is_reached(finished: Run) -> None:
    records, run = finished.records, Run(finished.folder)
    cpu = [records.cpu[number] for number in (1, 2)]
    assert CpuSeconds().measure(finished) == pytest.approx(sum(cpu))
    moved = [line for line in records.transfers if not line.step.startswith(("evaluate:", "setup:"))]
    mib = [sum(line.bytes for line in moved if line.round == number) / 2**20 for number in (1, 2)]
    measured = tuple(Measured(number, "server", "validation", {"r1_sum": 10.0 * number}) for number in (0, 1, 2))
    run.__dict__["records"] = replace(records, measurements=measured)
    costs: list[tuple[Any, list[float]]] = [("MiB", mib), ("CPU seconds", cpu)]
    for cost, (first, second) in costs:
        reached = [CostTo(metric="r1_sum", target=target, cost=cost).measure(run) for target in (0, 5, 20, 21)]
        assert reached[:3] == pytest.approx([0.0, first, first + second])
        assert math.isnan(reached[3])
    run.__dict__["records"] = replace(records, cpu={})  # of an older run
    assert math.isnan(CpuSeconds().measure(run))


def test_another_figure_of_a_saved_analysis_needs_no_models(tmp_path: Path) -> None:
    leakage = {"analysis": "leakage", "figure": "x"}
    column, other = (metrics.AnalysisColumn(**leakage, options=options) for options in ({}, {"samples": 99}))
    assert column.needs_models
    assert not column.is_at_hand(tmp_path)
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis" / "leakage.json").write_text('{"options": "{}"}')
    assert column.is_at_hand(tmp_path)
    assert not other.is_at_hand(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"analysis": "leakages"}, "no analysis 'leakages'; did you mean 'leakage'.*FILE.py:Class"),
        ({"analysis": "leakage", "options": {"sample": 3}}, "options: unknown key 'sample'; did you mean 'samples'"),
    ],
)
def test_analyses_that_cannot_be_are_refused_before_a_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        metrics.AnalysisColumn(figure="x", **settings).require(Experiment.load(tiny_experiment()))


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


# ---- gauges, against figures worked out by hand

RECORDED = [{"loss.a": 1.0, "loss.b": 3.0, "w.a": 0.75, "w.b": 0.25, "t": 12.0, "s": 10.0}, {"loss.a": 2.0, "t": 9.0}]


@pytest.fixture
def shown(finished: Run) -> Run:
    """A run whose server recorded ``RECORDED`` in two rounds."""
    lines = (Measured(number, "server", "train", metrics) for number, metrics in enumerate(RECORDED, 1))
    return with_records(finished, measurements=tuple(lines))


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
def test_values_recorded_by_the_server(shown: Run, settings: dict[str, Any], value: float) -> None:
    assert Recorded(**settings).measure(shown) == pytest.approx(value)


def test_a_gauge_is_a_difference_that_words_do_not_identify(shown: Run) -> None:
    content = {"shows": {"name": "recorded", "metric": "t"}, "minus": {"name": "recorded", "metric": "s"}}
    gauge = parse_settings(Gauge, {**content, "reads": "points", "below": 0.5, "then": "nothing is taught"})
    assert gauge.measure(shown) == 10.5 - 10
    assert gauge.digest == Gauge(**content, reads="other words").digest
    assert gauge.digest != Gauge(shows=content["shows"], reads="points").digest
    assert [gauge.is_beyond(value) for value in (0.5, 0.6, math.nan)] == [True, False, False]
    assert gauge.in_words == "points; from 0.5 down nothing is taught"
    assert math.isnan(Gauge(shows={"name": "recorded", "metric": "none.*"}, reads="").measure(shown))


def test_a_gauge_of_a_metric_is_that_metric(finished: Run) -> None:
    of_clients = Metric(metric="accuracy", of="image")
    gauge = Gauge(shows={"metric": "accuracy", "of": "image"}, reads="percent")
    assert gauge.measure(finished) == of_clients.measure(finished)
    assert not gauge.is_outcome
    assert not gauge.needs_models
