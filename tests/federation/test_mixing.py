"""Private and public batches together, references that do not move, and what counts as an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest
import torch
from torch import nn

from polyfed.data.samples import Batch
from polyfed.federation.public_outputs import FrozenCopy, Remembered, Stored, interleave
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Clock, Epochs, Trainer
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings, Schedule


def batch(number: int) -> Batch:
    index = torch.tensor([number])
    return Batch({"image": torch.full((1, 2), float(number))}, {}, index, index)


def batches() -> Iterator[Batch]:
    return (batch(number) for number in count())


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("wanted", [None, 1, 2, 3, 5, 20])
def test_every_private_batch_once_and_public_ones_spread_evenly(steps: int, wanted: int | None) -> None:
    pairs = list(interleave((batch(k) for k in range(steps)), batches(), steps, wanted))
    private = [int(own.index) for own, _ in pairs if own is not None]
    public = [int(other.index) for _, other in pairs if other is not None]
    total = wanted or steps
    assert private == list(range(steps))
    assert public == list(range(total))
    seen = 0
    for position, (own, other) in enumerate(pairs):
        seen += other is not None
        last_of_step = position + 1 == len(pairs) or pairs[position + 1][0] is not None
        if (
            last_of_step
        ):  # after k of s private batches at least k/s of the public ones are done, and fewer than one more
            done = sum(own is not None for own, _ in pairs[: position + 1])
            assert 0 <= seen - total * done / steps < 1


def test_no_private_batch_means_no_step() -> None:
    assert list(interleave(iter(()), batches(), 0)) == []


def test_stored_references_are_looked_up_by_index() -> None:
    reference = Stored({"image": torch.arange(8.0).view(4, 2)})
    assert reference("image", batch(2)).tolist() == [[4.0, 5.0]]


def test_a_frozen_copy_stays_as_it_was() -> None:
    model = Model({"image": nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))}, {}, 3).train()
    reference = FrozenCopy(model)
    before = reference("image", batch(1))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    after = reference("image", batch(1))
    assert torch.equal(before, after)  # neither moved nor dropped out
    assert not after.requires_grad
    assert model.training


def test_remembered_references_encode_each_distinct_input_once_and_stay_as_they_were() -> None:
    encoded: list[int] = []
    model = Model({"image": nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))}, {}, 3).train()
    places, inputs = torch.tensor([0, 0, 1, 2, 2]), torch.randn(3, 2)
    expected = FrozenCopy(model)("image", Batch({"image": inputs}, {}, torch.arange(3), torch.arange(3)))
    model.encoders["image"].register_forward_pre_hook(lambda _, given: encoded.append(len(given[0])))
    reference = Remembered(model, {"image": places})
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    for index in (torch.tensor([4, 0]), torch.tensor([1, 3]), torch.tensor([2, 0, 4])):
        asked = Batch({"image": inputs[places[index]]}, {}, index, index)
        torch.testing.assert_close(reference("image", asked), expected[places[index]])
    assert encoded == [2, 1]


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
    assert [epoch[:2] for epoch in seen] == [(0, 2), (0, 1), (0, 2), (1, 2), (0, 1), (1, 2)]


def test_a_loop_that_runs_once_is_at_the_first_rates() -> None:
    epochs = Epochs()
    trainer = trainer_of(epochs)
    assert [stepped(trainer) for _ in epochs.through(2, once=True)] == [1.0, 0.5]
