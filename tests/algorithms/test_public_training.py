"""Private and public batches together, and references that do not move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch
from torch import nn

from polyfed.algorithms.shared.public_training import FrozenCopy, Remembered, Stored, interleave
from polyfed.data.samples import Batch
from polyfed.models.model import Model


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
            assert 0 <= seen - total * sum(own is not None for own, _ in pairs[: position + 1]) / steps < 1


def test_no_private_batch_means_no_step() -> None:
    assert list(interleave(iter(()), batches(), 0)) == []


def test_stored_references_are_looked_up_by_index() -> None:
    assert Stored({"image": torch.arange(8.0).view(4, 2)})("image", batch(2)).tolist() == [[4.0, 5.0]]


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
    positions, inputs = torch.tensor([0, 0, 1, 2, 2]), torch.randn(3, 2)
    expected = FrozenCopy(model)("image", Batch({"image": inputs}, {}, torch.arange(3), torch.arange(3)))
    model.encoders["image"].register_forward_pre_hook(lambda _, given: encoded.append(len(given[0])))
    reference = Remembered(model, {"image": positions})
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    for index in (torch.tensor([4, 0]), torch.tensor([1, 3]), torch.tensor([2, 0, 4])):
        asked = Batch({"image": inputs[positions[index]]}, {}, index, index)
        torch.testing.assert_close(reference("image", asked), expected[positions[index]])
    assert encoded == [2, 1]
