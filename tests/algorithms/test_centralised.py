"""Centralised training: one long training in pieces, and its budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import polyfed
from by_hand import Weights, copies, model_of, play, weights_of
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from sessions import first_cohort, prepared, woken
from small_federations import Config, sized, transformers


@pytest.fixture
def config() -> Config:
    actual = sized(transformers(name="centralised"), 48)
    for group in actual["clients"].values():
        group |= {"count": 1, "items": 8 if group["task"] == actual["server"]["task"] else 32}
    return actual


def one_training(session: Session, client_id: str, start: Weights, epochs: int) -> Weights:
    """AdamW over so many passes, with one optimiser; pass k takes the batches of round k."""
    member = session.federation.members[client_id]
    model = model_of(session, client_id, start).train()
    # fused, as in a run: where a gradient is rounding noise (biases of keys), Adam magnifies differences of kernels
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.0, fused=True)
    for epoch in range(1, epochs + 1):
        for batch in woken(session, client_id, (epoch, 0)).batches(session.federation.train(member), "task-0"):
            optimizer.zero_grad()
            member.settings.task.loss(model, model.heads[member.head], batch).backward()
            optimizer.step()
    return weights_of(model)


def test_rounds_of_one_epoch_are_one_training_of_many(config: Config, tmp_path: Path) -> None:
    config["algorithm"]["local_epochs"] = 1
    session = prepared(config, tmp_path)
    start = copies(session.server.weights)
    play(session, 1, 3)
    for type_name in ("image", "text", "paired"):
        expected = one_training(session, type_name, start[type_name], 3)
        torch.testing.assert_close(session.server.weights[type_name], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(session.server.model.state_dict(), session.server.weights["paired"], rtol=0, atol=0)


def test_a_client_that_comes_later_starts_from_the_initial_weights_too(config: Config, tmp_path: Path) -> None:
    config["algorithm"]["local_epochs"] = 1
    session = prepared(config, tmp_path)
    start = copies(session.server.weights)
    cohort = first_cohort(session)
    cohort.clients = tuple(client for client in cohort.clients if client.id != "text")
    session.experiment.algorithm.round(session.server, cohort)
    assert all(torch.equal(value, start["text"][name]) for name, value in session.server.weights["text"].items())
    play(session, 2, 2)
    assert session.server.state["budget"]["text"].tolist() == [2, 1, 32]
    assert session.server.state["budget"]["image"].tolist() == [4, 2, 64]


@pytest.mark.parametrize(
    ("items", "settings", "steps", "epochs", "samples"),
    [
        (48, {"local_epochs": 2}, 12, 4, 192),
        (41, {"local_epochs": 1}, 6, 2, 82),
        (33, {"local_epochs": 1}, 4, 2, 64),  # a last batch of one sample is left out
        (41, {"local_steps": 4}, 8, 8 / 3, 2 * (41 + 16)),
        (41, {"local_steps": 2}, 4, 4 / 3, 64),
    ],
)
def test_the_budget_of_two_rounds(
    config: Config, tmp_path: Path, items: int, settings: Config, steps: int, epochs: float, samples: int
) -> None:
    config["clients"] = {"text": config["clients"]["text"] | {"items": items}}
    del config["server"]
    config["algorithm"] = {"name": "centralised"} | settings
    config["run"] |= {"rounds": 2, "evaluate_clients": False}
    result = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    expected = {"steps.text": steps, "epochs.text": epochs, "samples.text": samples}
    assert result.records.last("server", "train") == pytest.approx(expected)
    assert list(result.records.series("server", "steps.text", "train").values()) == [steps / 2, steps]
