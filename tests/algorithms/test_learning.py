"""Every method learns: figures that a federation reaches only if its participants train and exchange what they know."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyfed
from by_hand import assert_learns_topics
from polyfed.runs.experiment import Experiment
from sessions import prepared
from small_federations import Config, sized, topics, transformers

TOPICS: dict[str, tuple[Config, int]] = {
    "fedavg": ({}, 6),
    "fedema": ({"byol": {"predictor_width": 8}}, 6),
    "fedprox": ({"mu": 0.01}, 8),
    "fedprox:plain": ({"mu": 0.01, "norm": "plain"}, 8),
    "local": ({}, 6),
    "moon": ({}, 6),
    "moon:projected": ({"projection": 16}, 6),
    "scaffold": ({}, 6),
}
"""Method, with a word for a variation of it -> its settings, and rounds."""
FAST = {"fedavg", "fedmd"}
"""The others are variations, and methods whose learning differs from another's by one term: slow."""


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in TOPICS]
)
def test_clients_learn_topics(tmp_path: Path, name: str) -> None:
    settings, rounds = TOPICS[name]
    assert_learns_topics(prepared(topics(name=name.split(":")[0], **settings), tmp_path), rounds=rounds)


SERVERS: dict[str, Config] = {
    "fedet": {"task": None, "distiller": {"epochs": 3}, "share_head": False},
    "fedgems": {"epsilon": 0.75, "distiller": {"epochs": 3}},
    "fedgems:0": {"epsilon": 0.0, "distiller": {"epochs": 3}},
    "fedmkd": {"task": None},
    "fedmd": {"task": None, "distiller": {"epochs": 3}},
    "margin_weighted": {"task": None, "distiller": {"epochs": 3}},
}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SERVERS]
)
def test_a_server_learns_topics_from_its_clients(tmp_path: Path, name: str) -> None:
    """Without a task of its own, and with FedGEMS wherever it is wrong: from chance to twice as good."""
    config = topics(server=True, name=name.split(":")[0], **SERVERS[name])
    config["run"] |= {"rounds": 3, "evaluate_clients": name == "fedet"}
    records = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).records
    assert list(records.series("server", "accuracy").values())[-1] > 2 * 100 / 6
    if name == "fedet":
        assert list(records.series("text-0", "accuracy").values())[-1] > 2 * 100 / 6
    for metric, factor in {"fedgems": {"right.topic": 2}, "fedmkd": {"contrast": -1}}.get(
        name.split(":")[0], {}
    ).items():
        first, *_, last = records.series("server", metric, "train").values()
        assert last > factor * first if factor > 0 else last < first


def fitting(method: str, epochs: int) -> Config:
    """Transformers that are tested on the few texts and pairs that they train on."""
    config = sized(transformers(name=method, local_epochs=epochs), 48)
    del config["clients"]["image"]
    for group in config["clients"].values():
        group["test_split"] = "train"
    config["run"] |= {"rounds": 4, "eval_every": 4}
    return config


@pytest.mark.slow
def test_fediot_fits_texts(tmp_path: Path) -> None:
    records = polyfed.run(Experiment.parse(fitting("fediot", 6)), tmp_path / "run", quiet=True).records
    assert records.last("text-0")["accuracy"] > 2 * 100 / 6
    assert records.last("text-0")["accuracy"] == records.last("text-1")["accuracy"]  # one global model


def test_centralised_training_fits_texts(tmp_path: Path) -> None:
    config = fitting("centralised", 5)
    config["clients"] = {"text": config["clients"]["text"] | {"count": 1}}
    del config["server"]
    records = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).records
    assert records.last("text")["accuracy"] > 90  # chance is 17
