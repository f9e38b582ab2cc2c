"""FedEMA: two clients by hand over three rounds, its scale, random views, and that it learns."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import RATE, assert_mean, copies, naive_byol, play
from grids import mostly_slow
from polyfed.core.randomness import generator
from polyfed.federation.state import unflatten
from polyfed.models.model import Model
from polyfed.runs.session import Session
from sessions import metrics, prepared, site_of, woken
from small_federations import Config, in_steps, plain_sgd, scenes, training
from tiny_networks import save

AUGMENT = {"flip": True, "erase": True, "shift": 2}
SMALL = {"name": "fedema", "local_epochs": 1, "byol": {"predictor_width": 16}}


@pytest.fixture
def config(tiny: Config) -> Config:
    """``tiny`` with augmented images; texts have no random view."""
    for participant in (tiny["server"], *tiny["clients"].values()):
        participant["model"] = copy.deepcopy(participant["model"])
        participant["model"]["encoders"]["image"]["view"]["augment"] = AUGMENT
    tiny["algorithm"] = SMALL
    return tiny


def two_clients(config: Config, folder: Path, **algorithm: Any) -> Session:
    """Two clients with images, on plain SGD."""
    del config["server"], config["public"], config["clients"]["paired"]
    config["clients"]["image"]["count"] = 2
    config["algorithm"] = in_steps(config["algorithm"], 2) | algorithm
    return prepared(plain_sgd(config, 4), folder)


def kept(session: Session, client: str, number: int) -> dict[str, dict[str, Tensor]]:
    return unflatten(site_of(session).store.load(client, (number, 0)))


# ---- by hand


class ByHand:
    """A client of one modality in plain loops; remembers what it is to keep."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        result = session.experiment.algorithm
        self.task_weight, self.byol, self.blending = result.task_weight, result.byol, result.blending
        self.model: dict[str, Tensor] = {}
        self.target: dict[str, Tensor] = {}
        self.scale: float | None = None

    def fit(self, number: int, received: dict[str, Tensor]) -> tuple[float | None, float]:
        """Two steps of round ``number``; m and the mean loss of BYOL."""
        m = self.blended(received) if self.model else None
        member = self.session.federation.members[self.name]
        model, target = (self.session.federation.client_model(member).train() for _ in range(2))
        model.load_state_dict(self.model or received)
        target.load_state_dict(self.target or received)
        second = generator(self.session.server.clock.seed, number, self.name, "second-views")
        samples, losses = self.session.federation.train(member), []
        for batch in itertools.islice(woken(self.session, self.name, (number, 0)).batches(samples, "task-0"), 2):
            x = model.encoders["image"](batch.inputs["image"])
            loss = self.task_weight * F.cross_entropy(model.heads[member.head](x), batch.targets["label"])
            again = samples.inputs["image"](samples.rows["image"][batch.index], second)
            networks = model.encoders["image"], target.encoders["image"], model.extras["predictor_image"]
            byol = naive_byol(*networks, x, batch.inputs["image"], again)
            model.zero_grad()
            (loss + self.byol.weight * byol).backward()
            self.descend(model, target)
            losses.append(float(byol.detach()))
        self.model, self.target = (copy.deepcopy(dict(part.state_dict())) for part in (model, target))
        return m, sum(losses) / 2

    def blended(self, received: dict[str, Tensor]) -> float:
        gap = self.gap(received)
        self.scale = self.scale or self.blending.tau / gap
        m = min(self.scale * gap, 1.0)
        for key, value in self.model.items():
            self.model[key] = m * value + (1 - m) * received[key] if value.is_floating_point() else received[key]
        return m

    def gap(self, received: dict[str, Tensor]) -> float:
        member = self.session.federation.members[self.name]
        names = [key for key, _ in self.session.federation.client_model(member).encoders.named_parameters()]
        squares = []
        for name in names:
            difference = (received[f"encoders.{name}"] - self.model[f"encoders.{name}"]).flatten().tolist()
            squares.append(sum(value * value for value in difference))
        if self.blending.divergence == "norm":
            return math.sqrt(sum(squares))
        kernels = [
            math.sqrt(s) for name, s in zip(names, squares, strict=True) if self.model[f"encoders.{name}"].dim() > 1
        ]
        return sum(kernels) / len(kernels)

    @torch.no_grad()
    def descend(self, model: Model, target: Model) -> None:
        for key, value in model.named_parameters():
            if value.grad is not None:
                value -= RATE * value.grad
            slow = target.get_parameter(key)
            slow.copy_(self.byol.momentum * slow + (1 - self.byol.momentum) * value)


VARIED: list[Config] = [
    {},
    {"blending": {"divergence": "mean_layer"}, "byol": {"weight": 0.5, "predictor_width": 16}},
    {"task_weight": 0.0, "blending": {"tau": 0.2}, "byol": {"momentum": 0.5, "predictor_width": 16}},
]


@pytest.mark.parametrize("settings", mostly_slow(VARIED, *VARIED[::2]))
def test_three_rounds_equal_a_plain_loop(config: Config, tmp_path: Path, settings: Config) -> None:
    session = two_clients(config, tmp_path / "s", **settings)
    server = session.server
    (type_name,) = server.types
    samples = {info.id: info.samples for info in server.clients}
    hands = {name: ByHand(session, name) for name in samples}
    for number in (1, 2, 3):
        start = copies(server.weights)[type_name]
        play(session, number, number)
        done = [hand.fit(number, start) for hand in hands.values()]
        assert_mean(server.weights[type_name], {name: hand.model for name, hand in hands.items()}, samples)
        noted = metrics(session)
        assert noted["byol_clients"] == 2
        assert noted["byol"] == pytest.approx(sum(loss for _, loss in done) / 2, abs=1e-5)
        if number > 1:
            assert noted["blending"] == pytest.approx(sum(m or 0.0 for m, _ in done) / 2, rel=1e-4)
        for name, hand in hands.items():
            result = kept(session, name, number)["target"]
            assert all(
                torch.allclose(result[key.removeprefix("encoders.")].double(), value.double(), atol=1e-6)
                for key, value in hand.target.items()
                if key.startswith("encoders.")
            )


# ---- blending


def test_what_is_frozen_counts_for_nothing(config: Config, tmp_path: Path) -> None:
    """Adapters alone are sent, blended and compared."""
    config["data"]["weights_dir"] = str(save("vit", tmp_path / "weights").parent)
    view = {"name": "pixels", "size": 32, "augment": AUGMENT}
    network = {"name": "hf", "weights": "vit", "adapter": "lora", "view": view}
    config["clients"]["image"]["model"]["encoders"]["image"] = network
    session = two_clients(config, tmp_path / "s", blending={"tau": 0.3})
    play(session, 1, 2)
    assert metrics(session)["blending"] == pytest.approx(0.3, rel=1e-6)


def test_m_is_at_most_1_and_then_clients_go_on_alone(config: Config, tmp_path: Path) -> None:
    session = two_clients(config, tmp_path / "s", blending={"lam": 1e9})
    play(session, 1, 1)
    before = kept(session, "image-0", 1)["model"]
    client = woken(session, "image-0", (2, 0), (1, 0))
    (type_name,) = session.server.types
    assert session.experiment.algorithm.blending.load(client, session.server.weights_for(client.info)) == 1.0
    received = session.server.weights[type_name]
    for name, value in client.model.state_dict().items():
        assert torch.equal(value, before[name] if value.is_floating_point() else received[name]), name


def test_equal_weights_need_no_lambda(config: Config, tmp_path: Path) -> None:
    config["clients"]["image"]["count"] = 1
    session = prepared(config, tmp_path / "s")
    play(session, 1, 2)
    assert float(kept(session, "image", 2)["blending"]["lambda"]) == 0  # alone of its type: it receives what it sent
    assert float(kept(session, "paired-0", 2)["blending"]["lambda"]) > 0


# ---- random views


def test_views_that_are_not_random_are_left_to_the_task(tiny: Config, tmp_path: Path) -> None:
    tiny["algorithm"] = SMALL
    tokens = tiny["clients"]["paired"]["model"] = copy.deepcopy(tiny["clients"]["paired"]["model"])
    tokens["encoders"]["text"]["view"]["drop"] = 0.2
    tiny["server"]["model"] = tokens
    session = prepared(tiny, tmp_path / "s")
    play(session, 1, 1)
    assert metrics(session)["byol_clients"] == 2
    assert {name.split(".")[0] for name in kept(session, "paired-0", 1)["target"]} == {"text"}
    assert "target" not in kept(session, "image", 1)


# ---- learning


@pytest.mark.slow
def test_without_any_label_encoders_learn_and_do_not_collapse(config: Config, tmp_path: Path) -> None:
    """Pure BYOL of two clients: two views agree, and representations are still spread."""
    session, losses = learner(config, tmp_path / "s"), []
    for number in range(1, 6):
        play(session, number, number)
        losses.append(metrics(session)["byol"])
    assert losses[-1] < 0.6 * losses[0]
    client = woken(session, "image-0")
    client.load_weights(session.server.weights_for(client.info))
    assert float(client.represent(client.train)["image"].std(0).norm()) > 0.3  # of at most 1, for unit vectors


def learner(config: Config, folder: Path) -> Session:
    config["data"]["sources"] = {"private": scenes(400, 8, 400, difficulty=0.0)}
    del config["server"], config["public"], config["clients"]["paired"]
    image = config["clients"]["image"]
    image |= {"count": 2, "training": training("adam", 0.01, 32)}
    image["model"]["dim"] = 32
    encoder = image["model"]["encoders"]["image"]
    encoder["widths"] = [16, 32]
    encoder["view"]["augment"] = {"crop": 0.4, "flip": True, "erase": True}
    byol = {"momentum": 0.9, "predictor_width": 256}
    config["algorithm"] = SMALL | {"task_weight": 0.0, "byol": byol, "local_epochs": 3}
    return prepared(config, folder)
