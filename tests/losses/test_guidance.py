import math

import pytest
import torch

from polyfed.losses.distillation import squared_distance
from polyfed.losses.info_nce import info_nce


def by_loops(z, anchors, reduction):
    squares = [[(a - b) ** 2 for a, b in zip(own, other, strict=True)] for own, other in zip(z, anchors, strict=True)]
    total = sum(sum(row) for row in squares)
    return total / {"sum": 1, "mean": len(squares), "element": sum(len(row) for row in squares)}[reduction]


def contrast_by_loops(z, anchors, temperature):
    """(CE of the anchor of each row + CE of the row of each anchor) / 2."""
    scores = [[sum(a * b for a, b in zip(u, v, strict=True)) / temperature for v in anchors] for u in z]
    flipped = list(map(list, zip(*scores, strict=True)))
    losses = [
        math.log(sum(math.exp(value) for value in row)) - row[k]
        for side in (scores, flipped)
        for k, row in enumerate(side)
    ]
    return sum(losses) / len(losses)


@pytest.fixture
def pair():
    torch.manual_seed(4)
    return torch.nn.functional.normalize(torch.randn(2, 5, 3, dtype=torch.float64), dim=-1).unbind(0)


REDUCTIONS = ["sum", "mean", "element"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_it_equals_loops(pair, reduction):
    z, anchors = pair
    expected = by_loops(z.tolist(), anchors.tolist(), reduction)
    assert float(squared_distance(z, anchors, reduction)) == pytest.approx(expected, rel=1e-12)
    assert expected > 0.1


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_contrast_equals_loops(pair, temperature):
    expected = contrast_by_loops(pair[0].tolist(), pair[1].tolist(), temperature)
    assert float(info_nce(*pair, 1 / temperature)) == pytest.approx(expected, rel=1e-6)


def test_the_sum_is_the_default(pair):
    assert float(squared_distance(*pair)) == float(squared_distance(*pair, "sum"))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_go_both_ways_and_cancel(pair, reduction):
    z, anchors = (x.clone().requires_grad_() for x in pair)
    assert torch.autograd.gradcheck(lambda a, b: squared_distance(a, b, reduction), (z, anchors))
    squared_distance(z, anchors, reduction).backward()
    torch.testing.assert_close(z.grad, -anchors.grad)
    assert float(z.grad.norm()) > 0.01


def test_equal_ones_are_at_no_distance_and_have_no_gradient(pair):
    z = pair[0].clone().requires_grad_()
    loss = squared_distance(z, pair[0])
    loss.backward()
    assert loss.item() == 0
    assert float(z.grad.abs().max()) == 0  # no NaN either, which a root would give


def test_order_and_scale(pair):
    z, anchors = pair
    order = torch.tensor([3, 0, 4, 1, 2])
    for reduction in REDUCTIONS:
        loss = float(squared_distance(z, anchors, reduction))
        assert float(squared_distance(z[order], anchors[order], reduction)) == pytest.approx(loss)
        assert float(squared_distance(3 * z, 3 * anchors, reduction)) == pytest.approx(9 * loss)
        assert float(squared_distance(z, anchors[order], reduction)) != pytest.approx(loss)


def test_under_autocast_it_is_as_precise(pair):
    z, anchors = (x.float() for x in pair)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = squared_distance(z, anchors)
        contrast = info_nce(z, anchors, 1 / 0.07)
    assert loss.dtype == contrast.dtype == torch.float32
    assert float(loss) == float(squared_distance(z, anchors))
    assert float(contrast) == float(info_nce(z, anchors, 1 / 0.07))
