"""What a round costs, against counts by hand and against the ledger of a run."""

from __future__ import annotations

from dataclasses import replace
from mmap import PAGESIZE, mmap
from pathlib import Path

import pytest
import torch
from torch import nn

import polyfed
from polyfed.core.errors import ConfigError, ExchangeError
from polyfed.core.memory import PeakMemory
from polyfed.data.scenery.layout import LABELS
from polyfed.data.scenery.wording import TOPICS
from polyfed.lab.analysis.cost import ModelSize, RoundCosts, round_costs
from polyfed.lab.analysis.planned_traffic import planned_traffic, stand_in
from polyfed.lab.analysis.random_networks import RandomNetworks
from polyfed.runs.experiment import Experiment
from small_federations import Config, pixels, three_kinds, words
from tiny_networks import network, save

CLASSES = {"pictures": len(LABELS), "texts": len(TOPICS), "scenes": len(LABELS)}


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


def by_kind(found: RoundCosts) -> dict[str, int]:
    return {cost.kind: cost.flops for cost in found.costs}


@pytest.fixture(scope="module")
def fedavg() -> RoundCosts:
    return round_costs(Experiment.parse(weights_alone(1)))


def test_operations_of_a_client_of_texts_by_hand(fedavg: RoundCosts) -> None:
    """The mean of words is no matrix product: two layers, forward, and two products each backward, of which the first
    layer's second is of the words' embedding."""
    text = next(cost for cost in fedavg.costs if cost.kind == "text")
    width, dim, topics = 8, 8, len(TOPICS)
    a_sample = 3 * 2 * (width * dim + dim * topics)
    assert text.flops == text.samples * a_sample


def test_twice_the_epochs_are_twice_the_operations(fedavg: RoundCosts) -> None:
    twice = by_kind(round_costs(Experiment.parse(weights_alone(2))))
    assert twice == {kind: 2 * flops for kind, flops in by_kind(fedavg).items()}
    assert min(twice[kind] for kind in ("image", "text", "paired")) > 0


def test_one_client_of_each_kind_takes_part_and_the_server_only_averages(fedavg: RoundCosts) -> None:
    assert [cost.participant for cost in fedavg.costs] == ["image", "text", "paired-0", "server"]
    server = fedavg.costs[-1]
    assert (server.flops, server.size, server.memory, server.bytes) == (0, None, None, {})
    assert all(cost.seconds > 0 for cost in fedavg.costs)
    text = next(cost for cost in fedavg.costs if cost.kind == "text")
    assert text.moved("down") > 4 * text.size.parameters


@pytest.mark.slow
def test_a_later_round_costs_the_same_and_bytes_are_those_of_a_run(fedavg: RoundCosts, tmp_path: Path) -> None:
    content = weights_alone(1)
    later = round_costs(Experiment.parse(content), 2)
    assert by_kind(later) == by_kind(fedavg)
    run = polyfed.run(Experiment.parse(content), tmp_path / "run", quiet=True)
    lines = [line for line in run.records.transfers if line.round == 2 and not line.step.startswith("evaluate:")]
    for cost in later.costs[:-1]:
        for way in ("down", "up"):
            crossed = sum(line.bytes for line in lines if (line.client, line.direction) == (cost.participant, way))
            assert cost.moved(way) == crossed


def test_frozen_parameters_are_counted_and_not_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    assert ModelSize.of(model) == ModelSize(3 * 5 + 5 + 5 * 2 + 2, 5 * 2 + 2)


def test_the_peak_is_that_since_it_was_made() -> None:
    peak = PeakMemory(torch.device("cpu"))
    if (before := peak.read()) is None:
        pytest.skip("this system does not tell")
    with mmap(-1, 256 << 20) as block:  # the allocator may have as much that was freed, and need no more for a tensor
        for start in range(0, len(block), PAGESIZE):
            block[start] = 1
    most = peak.read()
    later = PeakMemory(torch.device("cpu")).read()
    assert most is not None
    assert most - before > 200 << 20
    assert later is not None
    assert later < most - (100 << 20)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((900, 500), (500, 500), True),
        ((900, 500), (510, 500), True),
        ((500, 500), (500, 500), True),
        ((900, 500), (900, 500), False),
    ],
)
def test_a_peak_that_the_system_does_not_reset_is_not_told(
    before: tuple[int, int], after: tuple[int, int], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [f"VmHWM:\t{most << 10} kB\nVmRSS:\t{now << 10} kB\n" for most, now in (before, after, (950, 600))]
    monkeypatch.setattr(Path, "write_text", lambda path, text: len(text))
    monkeypatch.setattr(Path, "read_text", lambda path: states.pop(0))
    assert PeakMemory(torch.device("cpu")).read() == (950 << 20 if told else None)


def test_a_client_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*of: object, **more: object) -> None:
        raise ValueError("no more")

    monkeypatch.setattr("polyfed.tasks.classification.Classification.loss", fail)
    with pytest.raises(ExchangeError, match="client 'image' failed in 'fit': ValueError: no more"):
        round_costs(Experiment.parse(weights_alone(1)))


def test_the_tables_have_a_line_for_each(fedavg: RoundCosts) -> None:
    work, sizes = fedavg.result().tables
    assert [row[0] for row in work.rows] == [cost.participant for cost in fedavg.costs]
    assert [row[0] for row in sizes.rows] == [
        cost.participant for cost in fedavg.costs[:-1]
    ]  # there is no server model
    assert all(len(row) == len(table.columns) for table in (work, sizes) for row in table.rows)
    assert fedavg.result().figures["costs"][1]["flops"] == fedavg.costs[1].flops


def test_a_round_that_asks_nobody_says_so(fedavg: RoundCosts) -> None:
    silent = replace(fedavg, costs=tuple(replace(cost, bytes={"down": {}, "up": {}}) for cost in fedavg.costs))
    assert "measure a later one with --round" in silent.result().tables[0].notes[-1]
    assert "--round" not in fedavg.result().tables[0].notes[-1]


# ---- without data


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedavg"},
        {"name": "creamfl", "contrast": {"batch_size": 4}},
        pytest.param({"name": "fedafd", "adversarial": {"batch_size": 4}}, marks=pytest.mark.slow),
    ],
    ids=lambda algorithm: str(algorithm["name"]),
)
def test_planned_bytes_are_those_of_a_round_with_the_data(algorithm: Config) -> None:
    content = hashed(three_kinds(**algorithm))
    content["data"]["sources"]["scenes"]["train"] = 60
    content["public"] |= {"items": 40}
    experiment = Experiment.parse(content)
    planned, real = planned_traffic(experiment, CLASSES), round_costs(experiment)
    for cost in real.costs[:-1]:
        for way in ("down", "up"):
            for kind, moved in cost.bytes[way].items():
                assert planned.bytes(cost.kind, way, kind) == pytest.approx(moved, abs=16), (cost.kind, way, kind)
    assert planned.counts == {"image": 1, "text": 1, "paired": 2}
    totals, kinds = planned.result().tables
    assert len(totals.rows) == 3
    assert len(kinds.rows) == len(planned.lines)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"trainable": 1}, {"adapter": "lora", "view": "native"}])
def test_planned_bytes_are_those_of_what_is_trained_of_a_network(settings: Config, tmp_path: Path) -> None:
    content = weights_alone(1)
    content["data"]["weights_dir"] = str(save("vit", tmp_path / "weights").parent)
    for group in ("image", "paired"):
        content["clients"][group]["model"]["encoders"]["image"] = {"name": "hf", "weights": "vit", **settings}
    experiment = Experiment.parse(content)
    real = round_costs(experiment)
    (tmp_path / "weights" / "vit" / "model.safetensors").unlink()
    planned = planned_traffic(experiment, CLASSES)
    for cost in real.costs[:-1]:
        for way in ("down", "up"):
            assert planned.total(cost.kind, way) == pytest.approx(cost.moved(way), abs=16), (cost.kind, way)


def test_blank_data_need_no_folder_and_no_weights(tmp_path: Path) -> None:
    for name in ("resnet-101", "resnet-18", "bert-base-uncased"):
        network(name.partition("-")[0]).config.save_pretrained(tmp_path / name)
    networks = RandomNetworks(tmp_path, tmp_path / "random")
    blank = stand_in(Experiment.load("creamfl-paper-scale"), {"cifar100": 100, "ag_news": 4}, 6, networks)
    assert {source.component_name() for source in blank.data.sources.values()} == {"blank"}
    encoders = [*blank.server.model.encoders.values()]
    encoders += [encoder for group in blank.clients.values() for encoder in group.models[0].encoders.values()]
    made = {str(path) for path in (tmp_path / "random").iterdir()}
    assert len(made) == 3
    assert {weights for encoder in encoders if (weights := getattr(encoder, "weights", None))} == made
    coco = blank.data.sources["coco"].open("public", name="coco", data_dir=None)
    assert len(coco) >= 6
    assert coco.modality("text").nested


@pytest.mark.parametrize(
    ("changes", "classes", "message"),
    [
        ({}, {}, r"classes of 'scenes' is not known .* --classes scenes=N"),
        ({"public": {"source": "scenes"}}, CLASSES, r"public\.items is all of a source .*--set public\.items=N"),
    ],
)
def test_what_cannot_be_planned(changes: Config, classes: dict[str, int], message: str) -> None:
    content = hashed(three_kinds(name="creamfl", contrast={"batch_size": 4})) | changes
    with pytest.raises(ConfigError, match=message):
        planned_traffic(Experiment.parse(content), classes)


def test_a_network_of_unknown_shape_cannot_be_planned(tmp_path: Path) -> None:
    content = weights_alone(1)
    content["data"]["weights_dir"] = str(tmp_path)
    content["clients"]["image"]["model"]["encoders"]["image"] = {"name": "hf", "weights": "nowhere"}
    with pytest.raises(ConfigError, match=r"encoder hf, weights: no folder 'nowhere'"):
        planned_traffic(Experiment.parse(content), CLASSES)
