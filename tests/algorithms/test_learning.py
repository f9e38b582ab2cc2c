"""Every method learns: figures that a federation reaches only if its participants train and exchange what they know."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyfed
from by_hand import assert_learns_topics
from grids import mostly_slow
from polyfed.runs.experiment import Experiment
from sessions import prepared
from small_federations import RETRIEVAL, Config, bag, resnet, scenes, sized, topics, training, transformers, words

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
FAST = {"fedavg"}
"""The others are variations, and methods whose learning differs from another's by one term: slow."""


@pytest.mark.parametrize("name", mostly_slow(TOPICS, *FAST))
def test_clients_learn_topics(tmp_path: Path, name: str) -> None:
    settings, rounds = TOPICS[name]
    assert_learns_topics(prepared(topics(name=name.split(":")[0], **settings), tmp_path), rounds=rounds)


SERVERS: dict[str, Config] = {
    "creamfl": {"contrast": {"batch_size": 16, "inter": {"tau": 0.1}}},
    "fedet": {},
    "fedgems": {"epsilon": 0.25},
    "fedmd": {},
    "fedmkd": {},
    "margin_weighted": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_a_server_learns_to_retrieve_from_its_clients(tiny: Config, tmp_path: Path, name: str) -> None:
    """Without a task of its own, except FedGEMS, its recall rises from what paired clients return."""
    tiny["data"]["sources"]["scenes"] = scenes(900, 40, 60, size=32, difficulty=0.0)
    tiny["public"]["items"] = 150
    tiny["clients"] = {"paired": tiny["clients"]["paired"]}
    for participant in (tiny["server"], tiny["clients"]["paired"]):
        participant["training"] = training("adamp", 0.003, 32)
        participant["task"] = RETRIEVAL | {"mask_siblings": True}
        participant["model"] = wide()
    alone = {} if name == "fedgems" else {"task": None}
    tiny["algorithm"] = {"name": name, "local_epochs": 2, "distiller": {"epochs": 2}} | alone | SERVERS[name]
    tiny["run"] |= {"rounds": 4}
    records = polyfed.run(Experiment.parse(tiny), tmp_path / "run", quiet=True).records
    chance = 100 * 10 / 60
    assert list(records.series("server", "text_to_image_r@10").values())[-1] > 1.7 * chance


def wide() -> Config:
    image = resnet() | {"widths": [16, 32, 64], "depths": [1, 1, 1], "view": {"name": "pixels", "size": 32}}
    return {"dim": 32, "encoders": {"image": image, "text": bag(words(24), 32)}}


def fitting(method: str, epochs: int) -> Config:
    """Transformers that are tested on the few texts that they train on."""
    config = sized(transformers(name=method, local_epochs=epochs), 48)
    if method == "creamfl_averaged":
        config["public"] = {"source": "scenes", "items": 6}
    if method != "fedcola":
        del config["clients"]["image"]
    config["clients"]["text"]["test_split"] = "train"
    config["run"] |= {"rounds": 4, "eval_every": 4}
    return config


@pytest.mark.slow
@pytest.mark.parametrize(("method", "epochs"), [("fediot", 6), ("fedcola", 12), ("creamfl_averaged", 6)])
def test_transformers_fit_texts(tmp_path: Path, method: str, epochs: int) -> None:
    records = polyfed.run(Experiment.parse(fitting(method, epochs)), tmp_path / "run", quiet=True).records
    assert records.last("text-0")["accuracy"] > 2 * 100 / 6
    assert records.last("text-0")["accuracy"] == records.last("text-1")["accuracy"]  # one global model


def test_centralised_training_fits_texts(tmp_path: Path) -> None:
    config = fitting("centralised", 5)
    config["clients"] = {"text": config["clients"]["text"] | {"count": 1}}
    del config["server"]
    records = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True).records
    assert records.last("text")["accuracy"] > 90  # chance is 17
