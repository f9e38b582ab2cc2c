"""ConVIRT, GLoRIA and MGCA in federations: rounds of methods with them, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from by_hand import copies, play
from polyfed.core.randomness import isolated
from sessions import prepared, woken
from small_federations import Config, bag, scenes, three_kinds, training, transformers, words


def aligned(task: Config, *, aligner: bool = True) -> Config:
    """Two paired clients with a small residual net and a bag of words, on scenes."""
    config = three_kinds(name="fedavg")
    paired = config["clients"]["paired"]
    image = paired["model"]["encoders"]["image"] | {"widths": [16, 32]}
    model = {"dim": 32, "encoders": {"image": image, "text": bag(words(16, 400), 32)}}
    if aligner:
        model["aligner"] = {"head": "linear", "local": True}
    sources = {"scenes": scenes(48, 8, 8, difficulty=0.0, columns={"image": "image", "text": "text"})}
    clients = {"paired": paired | {"model": model, "task": task, "training": training("adamw", 0.003, 16)}}
    kept = {key: value for key, value in config.items() if key not in ("server", "public")}
    return kept | {"data": {"sources": sources}, "clients": clients}


def of_blocks(task: Config) -> Config:
    """The same with transformers and without an aligner."""
    config = aligned(task, aligner=False)
    views = {name: one["view"] for name, one in transformers()["clients"]["paired"]["model"]["encoders"].items()}
    config["clients"]["paired"]["model"]["encoders"] = {
        "image": {"name": "vit", "size": "nano", "patch": 8, "view": views["image"]},
        "text": {"name": "bert", "size": "tiny", "view": views["text"]},
    }
    return config


SMALL = {"name": "papers.fedaid.objectives.MGCA", "prototypes": 16, "freeze_prototypes_steps": 3}
FEDERATIONS = {
    "convirt": lambda: aligned({"name": "convirt"}),
    "gloria": lambda: aligned({"name": "papers.fedaid.objectives.GLoRIA", "mask_siblings": True}),
    "mgca": lambda: aligned(SMALL),
    "mgca without aligner": lambda: of_blocks(SMALL | {"tokens": {"weights": "uniform"}}),
}


# by FedAvg and through MOON's view of a model each
@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "moon", "mu": 1.0}], ids=["fedavg", "moon"])
@pytest.mark.parametrize(
    "name", [name if name in ("gloria", "mgca") else pytest.param(name, marks=pytest.mark.slow) for name in FEDERATIONS]
)
def test_goes_through_rounds(name: str, method: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    config = FEDERATIONS[name]()
    config["algorithm"] = method | {"local_steps": 2}
    session = prepared(config, tmp_path / "run")
    (start,) = copies(session.server.weights).values()
    play(session, 1, 2)
    (end,) = session.server.weights.values()
    assert all(torch.isfinite(value).all() for value in end.values())
    trained = {name for name, value in end.items() if value.is_floating_point() and not value.equal(start[name])}
    assert any(".local." in name for name in trained) == ("aligner" in str(sorted(end)) and "convirt" not in name)
    assert {name.split(".")[1] for name in trained if name.startswith("encoders.")} == {"image", "text"}
    counts = [int(value) for name, value in end.items() if name.startswith("heads.") and name.endswith(".steps")]
    assert counts == ([4] if "mgca" in name else [])
    if counts:  # frozen for three steps, then not
        assert any(name.startswith("heads.") for name in trained)


@pytest.mark.slow
def test_learns_its_training_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 scenes in 60 steps: chance is an R@1 sum of 4.2 percent, of 200."""
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    config = FEDERATIONS["mgca"]()
    config["clients"]["paired"] |= {"count": 1}
    client = woken(prepared(config, tmp_path / "run"), "paired")
    assert len(client.train) == 48
    assert client.evaluate(client.train)["r1_sum"] < 15
    with isolated(0, "learn"):
        client.fit(client.train, epochs=1, steps=60)
    assert client.evaluate(client.train)["r1_sum"] > 40
