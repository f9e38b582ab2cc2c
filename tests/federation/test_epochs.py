"""Epochs, as all trainers of a participant count them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polyfed.federation import participant
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock, Epochs, Trainer
from polyfed.optim.settings import OptimizerSettings, Schedule
from sessions import prepared, woken

SCHEDULE = Schedule(kind="exponential", decay=0.5, unit="epoch")


def trainer_of(epochs: Epochs, rate: float = 1.0) -> Trainer:
    training = TrainingSettings(optimizer=OptimizerSettings(kind="sgd", lr=rate, momentum=0.0), schedule=SCHEDULE)
    return Trainer(nn.Linear(1, 1), training, Clock(0, 2, 4, 3), epochs)


def stepped(trainer: Trainer) -> float:
    """The rate that a step uses."""
    trainer.step(trainer.optimizer.param_groups[0]["params"][0].sum())
    return float(trainer.optimizer.param_groups[0]["lr"])


def test_all_trainers_of_a_party_follow_one_count() -> None:
    epochs = Epochs()
    one, two = trainer_of(epochs), trainer_of(epochs, 0.1)
    rates = [(stepped(one), stepped(two)) for _ in epochs.through(3)]
    torch.testing.assert_close(rates, [(0.5**k, 0.1 * 0.5**k) for k in (3, 4, 5)])  # round 2 of 3 epochs each


def test_a_step_outside_an_epoch_is_refused() -> None:
    epochs = Epochs()
    trainer = trainer_of(epochs)
    with pytest.raises(RuntimeError, match=r"participant\.epochs"):
        stepped(trainer)
    for _ in epochs.through(2):
        stepped(trainer)
        break
    with pytest.raises(RuntimeError, match=r"participant\.epochs"):  # the loop was left early
        stepped(trainer)


def test_passes_for_a_number_of_batches_are_one_epoch() -> None:
    epochs = Epochs()
    trainer = trainer_of(epochs)
    assert [(number, stepped(trainer)) for number in islice(epochs.as_one(), 3)] == [(0, 0.125), (1, 0.125), (2, 0.125)]


def test_a_loop_within_a_loop_counts_its_own() -> None:
    epochs = Epochs()
    seen = []
    for _ in epochs.through(2):
        seen += [epochs.now, *(epochs.now for _ in epochs.through(1)), epochs.now]
    assert seen == [(0, 2), (0, 1), (0, 2), (1, 2), (0, 1), (1, 2)]


def test_passes_made_at_once_train_alike(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny["clients"]["image"] |= {"items": 9, "training": {"batch_size": 16}}
    session, trained = prepared(tiny, tmp_path), []
    for most in (participant._AHEAD, -1):
        monkeypatch.setattr(participant, "_AHEAD", most)
        client = woken(session, next(name for name in session.federation.members if name.startswith("image")))
        assert client.fit(client.train, epochs=3) == 3
        trained.append([value.clone() for value in client.model.exchanged().values()])
    assert all(map(torch.equal, *trained))
