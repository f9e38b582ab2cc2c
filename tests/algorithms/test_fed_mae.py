"""FedMAE: two clients by hand, and that it learns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from by_hand import RATE, assert_mean, copies, descend, model_of, play, weights_of
from polyfed.core.randomness import generator
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from sessions import metrics, prepared, woken
from small_federations import Config, in_steps, plain_sgd, scenes, sized, training, transformers


@pytest.fixture
def config() -> Config:
    actual = sized(transformers(name="fed_mae", decoder_depth=1, decoder_width=32, decoder_heads=2), 48)
    for participant in (actual["server"], actual["clients"]["image"], actual["clients"]["paired"]):
        participant["model"] = copy.deepcopy(participant["model"])
        participant["model"]["encoders"]["image"] |= {"patch": 4}  # 16 of an image of 16 pixels
    return actual


def two_clients(config: Config, folder: Path, **algorithm: Any) -> Session:
    """Two clients with images of one type, on plain SGD."""
    del config["server"], config["clients"]["paired"], config["clients"]["text"]
    config["clients"]["image"]["count"] = 2
    config["algorithm"] = in_steps(config["algorithm"], 2) | algorithm
    return prepared(plain_sgd(config), folder)


def by_hand(session: Session, client_id: str, start: dict[str, Tensor], number: int, **weights: float) -> Any:
    """Two steps of SGD on task + reconstruction, patch by patch; the trained weights and the mean reconstruction."""
    member = session.federation.members[client_id]
    model = model_of(session, client_id, start).train()
    masks = generator(session.server.clock.seed, number, client_id, "masks")
    client, losses = woken(session, client_id, (number, 0)), []
    batches = client.batches(session.federation.train(member), "task-0")
    for _ in range(2):
        batch = next(batches)
        rebuilt = rebuilt_by_hand(model, batch.inputs["image"], torch.rand(len(batch), 16, generator=masks))
        losses.append(float(rebuilt.detach()))
        loss = weights["mae"] * rebuilt
        loss = loss + weights["task"] * member.settings.task.loss(model, model.heads[member.head], batch)
        descend(model, loss, RATE)
    return weights_of(model), sum(losses) / 2


def rebuilt_by_hand(model: Any, x: Tensor, lots: Tensor) -> Tensor:
    encoder, decoder = model.encoders["image"], model.extras["mae_image"]
    errors = []
    for picture, row in zip(x, lots, strict=True):
        order = row.argsort().tolist()
        seen, hidden = order[:4], order[4:]  # a quarter of 16
        tokens = encoder.embedding(picture[None])[0]
        encoded = encoder.encode(tokens[:, [0, *(1 + k for k in seen)]])[0]
        known = dict(zip(seen, decoder.embed(encoded[1:]), strict=True))
        cells = [known.get(k, decoder.mask[0, 0]) + decoder.positions[k] for k in range(16)]
        out = torch.stack([decoder.embed(encoded[0]), *cells])[None]
        for block in decoder.blocks:
            out = block(out)
        pixels = decoder.pixels(decoder.norm(out))[0, 1:]
        for k in hidden:
            top, left = 4 * (k // 4), 4 * (k % 4)
            true = picture[:, top : top + 4, left : left + 4].permute(1, 2, 0).flatten()
            true = (true - true.mean()) / (true.var() + 1e-6).sqrt()
            errors.append((pixels[k] - true).square().mean())
    return torch.stack(errors).mean()


@pytest.mark.parametrize("task", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_two_rounds_equal_a_plain_loop(config: Config, tmp_path: Path, task: float) -> None:
    session = two_clients(config, tmp_path / "s", task_weight=task, mae_weight=0.5)
    server = session.server
    (type_name,) = server.types
    samples = {info.id: info.samples for info in server.clients}
    for number in (1, 2):
        start = copies(server.weights)[type_name]
        play(session, number, number)
        done = {name: by_hand(session, name, start, number, mae=0.5, task=task) for name in samples}
        assert_mean(server.weights[type_name], {name: weights for name, (weights, _) in done.items()}, samples)
        mean = sum(samples[name] * loss for name, (_, loss) in done.items()) / sum(samples.values())
        noted = metrics(session)
        assert noted["mae_clients"] == 2
        assert noted["reconstruction"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.slow
def test_it_learns_to_rebuild_and_to_classify(config: Config, tmp_path: Path) -> None:
    """Two clients on 48 images each: better at images and at their own labels."""
    del config["server"], config["clients"]["paired"], config["clients"]["text"]
    image = config["clients"]["image"]
    config["data"]["sources"] = {"pictures": scenes(96, 8, 8, difficulty=0.0)}
    image |= {"count": 2, "test_split": "train", "training": training("adamw", 0.003, 16)}
    image["model"]["encoders"]["image"] |= {"depth": 1, "pooling": "mean"}
    config["algorithm"] |= {"local_epochs": 20, "normalise_patches": False, "mask_ratio": 0.5, "mae_weight": 10.0}
    config["run"] |= {"rounds": 5}
    result = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    losses = list(result.records.series("server", "reconstruction", "train").values())
    accuracy = list(result.records.series("image-0", "accuracy").values())
    assert losses[-1] < 0.8 * losses[0]
    assert accuracy[-1] > 40.0  # chance is 6
