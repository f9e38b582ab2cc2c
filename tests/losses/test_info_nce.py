import math

import pytest
import torch
from torch.nn import functional as F

from polyfed.losses.info_nce import InfoNCE, info_nce


def by_loops(u, v, scale, items=None, weight=0.5):
    n, total = len(u), 0.0
    for left, right, share in ((u, v, weight), (v, u, 1 - weight)):
        for i in range(n):
            seen = [j for j in range(n) if j == i or items is None or items[i] != items[j]]
            logits = {j: scale * float(left[i] @ right[j]) for j in seen}
            total += share * (math.log(sum(math.exp(x) for x in logits.values())) - logits[i])
    return total / n


@pytest.fixture
def pairs():
    torch.manual_seed(1)
    return tuple(F.normalize(torch.randn(6, 4, dtype=torch.float64), dim=1) for _ in range(2))


@pytest.mark.parametrize("items", [None, [0, 0, 1, 1, 1, 2], [5] * 6])
def test_equals_loops(pairs, items):
    ids = None if items is None else torch.tensor(items)
    assert float(info_nce(*pairs, 4.0, ids)) == pytest.approx(by_loops(*pairs, 4.0, items), abs=1e-9)


@pytest.mark.parametrize("weight", [0.0, 0.75, 1.0])
def test_directions_are_weighted(pairs, weight):
    expected = by_loops(*pairs, 4.0, weight=weight)
    assert float(info_nce(*pairs, 4.0, weight=weight)) == pytest.approx(expected, abs=1e-9)
    assert float(info_nce(*reversed(pairs), 4.0, weight=1 - weight)) == pytest.approx(expected, abs=1e-9)
    loss = InfoNCE(0.25, weight=weight, reduction="sum")
    assert float(loss(*pairs).detach()) == pytest.approx(2 * expected, abs=1e-5)


def test_batch_of_one_is_zero():
    z = torch.ones(1, 3)
    assert float(info_nce(z, z, 10.0)) == 0.0


def test_starts_at_the_temperature_and_may_be_fixed():
    assert float(InfoNCE(0.07).scale) == pytest.approx(14.2857, abs=1e-3)
    assert list(InfoNCE(learnable=False).parameters()) == []
    assert "log_scale" in InfoNCE(learnable=False).state_dict()


@pytest.mark.parametrize(("stored", "expected"), [(9.0, 100.0), (-3.0, 1.0)])
def test_scale_is_brought_back_into_range_and_can_leave_the_bound(pairs, stored, expected):
    loss = InfoNCE()
    loss.log_scale.data.fill_(stored)
    u, v = (side.float() for side in pairs)
    loss(u, v).backward()
    assert float(loss.scale.detach()) == pytest.approx(expected, rel=1e-5)
    assert loss.log_scale.grad is not None
    assert float(loss.log_scale.grad) != 0.0
