"""Losses of masks and of classes, and BYOL, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.losses.classification import class_separation, margin_cross_entropy
from polyfed.losses.segmentation import cross_entropy_dice, focal, focal_dice, soft_dice
from polyfed.losses.self_supervised import Predictor, TargetNetwork, byol, symmetric_byol


def some(seed: int = 0, shape: tuple[int, ...] = (3, 4, 5)) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=stream), (torch.rand(shape, generator=stream) < 0.4).to(torch.uint8)


def naive_focal(logits: Tensor, masks: Tensor, gamma: float) -> float:
    total = 0.0
    pairs = list(zip(logits.double().flatten().tolist(), masks.flatten().tolist(), strict=True))
    for z, m in pairs:
        chance = 1 / (1 + math.exp(-z))
        p = chance if m else 1 - chance
        total += -((1 - p) ** gamma) * math.log(p)
    return total / len(pairs)


def naive_dice(logits: Tensor, masks: Tensor, smooth: float) -> float:
    both = chances = truth = 0.0
    for z, m in zip(logits.double().flatten().tolist(), masks.flatten().tolist(), strict=True):
        p = 1 / (1 + math.exp(-z))
        both, chances, truth = both + p * m, chances + p, truth + m
    return (2 * both + smooth) / (chances + truth + smooth)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
def test_focal_is_the_formula(gamma: float) -> None:
    logits, masks = some()
    assert float(focal(logits, masks, gamma)) == pytest.approx(naive_focal(logits, masks, gamma), rel=1e-5)


@pytest.mark.parametrize("smooth", [0.01, 1.0, 10.0])
def test_soft_dice_is_the_formula(smooth: float) -> None:
    logits, masks = some(2)
    assert float(soft_dice(logits, masks, smooth)) == pytest.approx(naive_dice(logits, masks, smooth), rel=1e-5)


@pytest.mark.parametrize("weights", [{}, {"focal_weight": 3.0, "dice_weight": 0.5, "gamma": 1.0}])
def test_the_sum_has_the_weights_of_the_paper(weights: dict[str, float]) -> None:
    logits, masks = some(4)
    a, b, gamma = ({"focal_weight": 10.0, "dice_weight": 1.0, "gamma": 2.0} | weights).values()
    expected = a * naive_focal(logits, masks, gamma) - b * math.log(naive_dice(logits, masks, 1.0))
    assert float(focal_dice(logits, masks, **weights)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [60.0, 1e4])
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_certain_logits_have_finite_values_and_slopes(scale: float, gamma: float) -> None:
    masks = torch.tensor([[[0, 1], [1, 0]]])
    logits = (scale * (2.0 * masks - 1)).requires_grad_()
    loss = focal_dice(logits, masks, gamma=gamma)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    assert bool(logits.grad.isfinite().all())
    wrong = (-logits.detach()).requires_grad_()
    focal_dice(wrong, masks, gamma=gamma).backward()
    assert bool(wrong.grad.isfinite().all())


def test_an_empty_batch_of_masks_wants_nothing_predicted() -> None:
    masks = torch.zeros(2, 3, 3)
    low, high = torch.full((2, 3, 3), -9.0), torch.full((2, 3, 3), 9.0)
    assert float(focal_dice(low, masks)) < 0.01 < 1 < float(focal_dice(high, masks))


def naive_cross_entropy_dice(logits: Tensor, masks: Tensor, over: str, background: bool, weight: float) -> float:
    """Pixel by pixel."""
    b, c, h, w = logits.shape
    p = logits.double().softmax(1)
    pixels = [(n, y, x) for n in range(b) for y in range(h) for x in range(w) if int(masks[n, y, x]) < c]
    entropies = []
    for n in range(b):
        own = [-math.log(float(p[n, int(masks[n, y, x]), y, x])) for m, y, x in pixels if m == n]
        entropies.append(sum(own) / max(1, len(own)))
    groups = [range(b)] if over == "batch" else [[n] for n in range(b)]
    shares = []
    for group in groups:
        for k in range(0 if background else 1, c):
            mine = [(float(p[n, k, y, x]), float(masks[n, y, x] == k)) for n, y, x in pixels if n in group]
            both, sizes = sum(q * m for q, m in mine), sum(q + m for q, m in mine)
            shares.append((2 * both + 1) / (sizes + 1))
    return sum(entropies) / b + weight * (1 - sum(shares) / len(shares))


@pytest.mark.parametrize("over", ["batch", "picture"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("weight", [1.0, 0.0, 2.0])
def test_cross_entropy_with_dice_is_the_formula(over: str, background: bool, weight: float) -> None:
    stream = torch.Generator().manual_seed(5)
    logits, masks = torch.randn(3, 3, 2, 4, generator=stream), torch.randint(0, 4, (3, 2, 4), generator=stream)
    masks[masks == 3], masks[2] = 255, 255  # left out, also a full image
    made = cross_entropy_dice(logits, masks.to(torch.uint8), dice_weight=weight, over=over, background=background)
    assert float(made) == pytest.approx(naive_cross_entropy_dice(logits, masks, over, background, weight), rel=1e-5)


# ---- classes: margins and separation


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


# ---- BYOL, its predictor and its target network


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
