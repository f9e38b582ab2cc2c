"""BYOL against plain loops, its predictor and its target network."""

import math

import pytest
import torch
from torch import nn

from polyfed.losses.self_supervised import Predictor, TargetNetwork, byol, symmetric_byol


def by_loops(predictions, targets):
    values = []
    for p, t in zip(predictions.tolist(), targets.tolist(), strict=True):
        dot = sum(a * b for a, b in zip(p, t, strict=True))
        norms = math.sqrt(sum(a * a for a in p)) * math.sqrt(sum(b * b for b in t))
        values.append(2 - 2 * dot / norms)
    return sum(values) / len(values)


@pytest.fixture
def four():
    torch.manual_seed(5)
    return [torch.randn(6, 4, dtype=torch.float64) for _ in range(4)]


def test_equals_loops(four):
    p, t, *_ = four
    assert float(byol(p, t)) == pytest.approx(by_loops(p, t), abs=1e-12)


def test_each_view_predicts_the_other(four):
    p1, p2, t1, t2 = four
    expected = by_loops(p1, t2) + by_loops(p2, t1)
    assert float(symmetric_byol((p1, p2), (t1, t2))) == pytest.approx(expected, abs=1e-12)


def test_is_finite_at_zero(four):
    assert float(byol(torch.zeros(2, 4), four[0][:2].float())) == pytest.approx(2)


def test_the_predictor_exchanges_parameters_only_and_works_on_its_batch():
    predictor = Predictor(8, 16)
    assert set(predictor.state_dict()) == {name for name, _ in predictor.named_parameters()}
    assert sum(value.numel() for value in predictor.parameters()) == 8 * 16 + 2 * 16 + 16 * 8 + 8
    x = torch.randn(4, 8)
    hidden = x @ predictor[0].weight.T
    normed = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    expected = normed.relu() @ predictor[3].weight.T + predictor[3].bias
    assert torch.allclose(predictor.eval()(x), expected, atol=1e-5)


def test_the_target_starts_equal_and_follows_slowly():
    online = {"a": nn.Linear(3, 2), "b": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}
    target = TargetNetwork(online, momentum=0.9)
    before = {name: value.clone() for name, value in target.named_parameters()}
    with torch.no_grad():
        for module in online.values():
            for value in module.parameters():
                value += 1
    online["b"][1].running_mean += 5
    target.follow()
    target.follow()
    for name, value in target.named_parameters():
        assert not value.requires_grad
        assert torch.allclose(value, before[name] + 0.1 + 0.9 * 0.1, atol=1e-6), name
    assert target["b"][1].running_mean.abs().sum() == 0
