"""The contrast with a queue against a plain loop, and which targets are negatives."""

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.contrast import queue_contrast


def naive(student, targets, queue, items, queued, tau):
    losses = []
    for k, row in enumerate(student.tolist()):
        own, rest = None, 0.0
        candidates = [
            *zip(targets.tolist(), items.tolist(), strict=True),
            *zip(queue.tolist(), queued.tolist(), strict=True),
        ]
        for j, (target, item) in enumerate(candidates):
            logit = sum(a * b for a, b in zip(row, target, strict=True)) / tau
            if j == k:
                own = logit
            elif item != items.tolist()[k]:
                rest += math.exp(logit)
        losses.append(math.log(math.exp(own) + rest) - own)
    return sum(losses) / len(losses)


@pytest.fixture
def rows():
    torch.manual_seed(2)
    return [F.normalize(torch.randn(n, 6, dtype=torch.float64), dim=1) for n in (4, 4, 7)]


@pytest.mark.parametrize("tau", [0.1, 1.0])
@pytest.mark.parametrize("items", [[0, 1, 2, 3], [0, 0, 1, 2]])
def test_equals_loops(rows, tau, items):
    items, queued = torch.tensor(items), torch.tensor([9, 0, 8, 7, 2, 6, 5])
    expected = naive(*rows, items, queued, tau)
    assert float(queue_contrast(*rows, items, queued, tau)) == pytest.approx(expected, abs=1e-12)


def test_without_a_queue_the_batch_is_left_and_one_item_is_no_contrast(rows):
    student, targets, queue = rows
    none = torch.zeros(0, dtype=torch.int64)
    found = queue_contrast(student, targets, queue[:0], torch.arange(4), none, 0.1)
    assert float(found) == pytest.approx(naive(student, targets, queue[:0], torch.arange(4), none, 0.1), abs=1e-12)
    assert float(queue_contrast(student, targets, queue[:0], torch.zeros(4, dtype=torch.int64), none)) == 0.0


def test_targets_of_the_batch_carry_gradient(rows):
    student, targets, queue = (value.requires_grad_() for value in rows)
    queue_contrast(student, targets, queue.detach(), torch.arange(4), torch.arange(7) + 4).backward()
    assert float(student.grad.abs().sum()) > 0
    assert float(targets.grad.abs().sum()) > 0


def test_full_precision_inside_autocast(rows):
    rows = [value.float() for value in rows]
    ids = torch.arange(4), torch.arange(7) + 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = queue_contrast(*rows, *ids)
    assert torch.equal(found, queue_contrast(*rows, *ids))
