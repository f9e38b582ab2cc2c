"""Sinkhorn-Knopp: against loops, its marginals in the limit, extreme scores, precision, no gradient."""

import math

import pytest
import torch

from polyfed.losses.mgca import sinkhorn


def by_loops(scores, epsilon, iterations):
    q = [[math.exp(x / epsilon) for x in row] for row in scores.tolist()]
    b, k = len(q), len(q[0])
    for _ in range(iterations):
        for j in range(k):
            total = sum(q[i][j] for i in range(b))
            for i in range(b):
                q[i][j] *= 1 / (k * total)
        for i in range(b):
            total = sum(q[i])
            q[i] = [x / (b * total) for x in q[i]]
    return [[x / sum(row) for x in row] for row in q]


@pytest.fixture
def scores():
    return torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("iterations", [0, 1, 3, 20])
@pytest.mark.parametrize("epsilon", [0.05, 0.7])
def test_equals_loops(scores, epsilon, iterations):
    found = sinkhorn(scores, epsilon, iterations)
    torch.testing.assert_close(found, torch.tensor(by_loops(scores, epsilon, iterations), dtype=torch.float64))


def test_both_marginals_in_the_limit(scores):
    found = sinkhorn(scores, 0.2, 500)
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(found.sum(0), torch.full((4,), 6 / 4, dtype=torch.float64))
    assert not torch.allclose(sinkhorn(scores, 0.2, 1).sum(0), torch.full((4,), 1.5, dtype=torch.float64), atol=1e-3)


def test_rows_always_add_up_to_one(scores):
    torch.testing.assert_close(sinkhorn(scores.float(), 0.05, 3).sum(1), torch.ones(6))


def test_order_of_samples_and_of_prototypes_goes_along(scores):
    rows, columns = torch.tensor([3, 1, 5, 0, 2, 4]), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(sinkhorn(scores[rows][:, columns]), sinkhorn(scores)[rows][:, columns])


def test_scores_whose_exponential_overflows(scores):
    found = sinkhorn((1000 * scores).float(), 0.05, 3)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, sinkhorn(1000 * scores, 0.05, 3).float(), atol=1e-4, rtol=1e-3)


def test_one_sample_belongs_to_all_alike(scores):
    torch.testing.assert_close(sinkhorn(scores[:1], 0.05, 3), torch.full((1, 4), 0.25, dtype=torch.float64))


def test_full_precision_under_autocast_and_no_gradient(scores):
    scores = scores.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = sinkhorn(scores)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert torch.equal(found, sinkhorn(scores.detach().float()))
