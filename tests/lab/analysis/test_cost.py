"""Costs of a round, against counts by hand and against the ledger of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed
from polyfed.core.errors import StepError
from polyfed.data.scenery import TOPICS
from polyfed.lab.analysis.cost import ModelSize, PeakMemory, RoundCosts, round_costs
from polyfed.runs.experiment import Experiment
from small_federations import Config, pixels, three_kinds, words


def hashed(content: Config) -> Config:
    """With vocabularies that depend on no text."""
    for section in filter(None, (content.get("server"), *content["clients"].values())):
        for encoder in section["model"]["encoders"].values():
            encoder["view"] = words(16, 200) if encoder["view"]["name"] == "tokens" else pixels()
    return content


def weights_alone(epochs: int) -> Config:
    """Clients that average their weights, without server model and public set."""
    content = three_kinds(name="fedavg", local_epochs=epochs)
    del content["server"], content["public"]
    return hashed(content)


def by_kind(result: RoundCosts) -> dict[str, int]:
    return {cost.kind: cost.flops for cost in result.costs}


@pytest.fixture(scope="module")
def fedavg() -> RoundCosts:
    return round_costs(Experiment.parse(weights_alone(1)))


def test_operations_of_a_client_of_texts_by_hand(fedavg: RoundCosts) -> None:
    """The mean of words has no matrix product: two layers, forward, and two products each backward, of which the first
    layer's second is of the words' embedding."""
    text = next(cost for cost in fedavg.costs if cost.kind == "text")
    width, dim, topics = 8, 8, len(TOPICS)
    a_sample = 3 * 2 * (width * dim + dim * topics)
    assert text.flops == text.samples * a_sample


def test_twice_the_epochs_are_twice_the_operations(fedavg: RoundCosts) -> None:
    twice = by_kind(round_costs(Experiment.parse(weights_alone(2))))
    assert twice == {group: 2 * flops for group, flops in by_kind(fedavg).items()}
    assert min(twice[group] for group in ("image", "text", "paired")) > 0


def test_one_client_of_each_kind_takes_part_and_the_server_only_averages(fedavg: RoundCosts) -> None:
    assert [cost.participant for cost in fedavg.costs] == ["image", "text", "paired-0", "server"]
    server = fedavg.costs[-1]
    assert (server.flops, server.size, server.memory, server.bytes) == (0, None, None, {})
    assert all(cost.seconds > 0 for cost in fedavg.costs)
    text = next(cost for cost in fedavg.costs if cost.kind == "text")
    assert text.moved("down") > 4 * text.size.parameters


@pytest.mark.slow
def test_bytes_are_those_of_a_run(fedavg: RoundCosts, tmp_path: Path) -> None:
    run = polyfed.run(Experiment.parse(weights_alone(1)), tmp_path / "run", quiet=True)
    lines = [line for line in run.records.transfers if line.round == 1 and not line.step.startswith("evaluate:")]
    for cost in fedavg.costs[:-1]:
        for way in ("down", "up"):
            crossed = sum(line.bytes for line in lines if (line.client, line.direction) == (cost.participant, way))
            assert cost.moved(way) == crossed


def test_frozen_parameters_are_counted_and_not_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    assert ModelSize.of(model) == ModelSize(3 * 5 + 5 + 5 * 2 + 2, 5 * 2 + 2)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [*(((900, 500), (most, 500), most < 900) for most in (500, 510, 900)), ((500, 500), (500, 500), True)],
)
def test_a_peak_that_the_system_does_not_reset_is_not_told(
    before: tuple[int, int], after: tuple[int, int], shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [f"VmHWM:\t{most << 10} kB\nVmRSS:\t{now << 10} kB\n" for most, now in (before, after, (950, 600))]
    monkeypatch.setattr(Path, "write_text", lambda path, text: len(text))
    monkeypatch.setattr(Path, "read_text", lambda path: states.pop(0))
    assert PeakMemory(torch.device("cpu")).read() == (950 << 20 if shown else None)


def test_a_client_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*of: object, **more: object) -> None:
        raise ValueError("no more")

    monkeypatch.setattr("polyfed.tasks.classification.Classification.loss", fail)
    with pytest.raises(StepError, match="client 'image', step 'fit' of FedAvg: ValueError: no more"):
        round_costs(Experiment.parse(weights_alone(1)))
