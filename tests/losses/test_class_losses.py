"""Losses of classes against plain loops: margins and separation."""

import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.classification import class_separation, margin_cross_entropy


def test_margin_equals_loops():
    torch.manual_seed(4)
    logits, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    losses = []
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        z[y] -= 4
        losses.append(math.log(sum(map(math.exp, z))) - z[y])
    assert float(margin_cross_entropy(logits, labels, 4.0)) == pytest.approx(sum(losses) / 5)


def test_margin_zero_is_plain_cross_entropy_and_leaves_the_logits_alone():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    before = logits.clone()
    assert torch.equal(margin_cross_entropy(logits, labels, 0.0), F.cross_entropy(logits, labels))
    margin_cross_entropy(logits, labels, 4.0)
    assert torch.equal(logits, before)


def test_separation_by_hand():
    weight = torch.tensor([[1.0, -5.0], [1.0, 2.0]])
    # relu(W) relu(W)^T = [[1, 1], [1, 5]]
    expected = (math.log(2) + math.log(1 + math.exp(-4))) / 2
    assert float(class_separation(weight)) == pytest.approx(expected, rel=1e-5)
