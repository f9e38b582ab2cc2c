"""Token and prototype alignment, and Sinkhorn-Knopp: against loops; masks, weights, quantiles, limits."""

import math

import pytest
import torch
from papers.fedaid.objectives import prototype_alignment, sinkhorn, token_alignment, token_weights, uniform_weights
from torch.nn import functional as F

from naive import dot, softmax, unit_vector


def tokens_by_loops(tokens, others, weights, mask, other_mask, tau):
    total = 0.0
    for b in range(len(tokens)):
        own = [unit_vector(row) for row, kept in zip(tokens[b].tolist(), mask[b].tolist(), strict=True) if kept]
        other = [unit_vector(row) for row, kept in zip(others[b].tolist(), other_mask[b].tolist(), strict=True) if kept]
        if not other:
            continue
        attended = []
        for token in own:
            shares = softmax([dot(token, o) / tau for o in other])
            attended.append(unit_vector([dot(shares, column) for column in zip(*other, strict=True)]))
        for i, weight in enumerate(weights[b][mask[b]].tolist()):
            actual = dot(own[i], attended[i]) / tau
            row = math.log(sum(math.exp(dot(own[i], a) / tau) for a in attended))
            column = math.log(sum(math.exp(dot(token, attended[i]) / tau) for token in own))
            total += weight * ((row - actual) + (column - actual)) / 2
    return total / len(tokens)


def quantile(values, q):
    ordered, place = sorted(values), q * (len(values) - 1)
    low = int(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


@pytest.fixture
def sides():
    stream = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 5, 3, dtype=torch.float64, generator=stream)
    return tokens, torch.randn(4, 7, 3, dtype=torch.float64, generator=stream)


@pytest.fixture
def masks():
    mask, other = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 7, dtype=torch.bool)
    mask[0, 2:] = mask[3, 0] = other[1, 3:] = False
    return mask, other


@pytest.fixture
def weights(masks):
    return torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * masks[0]


def test_tokens_equal_loops(sides, masks, weights):
    expected = tokens_by_loops(*sides, weights, *masks, 0.3)
    assert expected > 0.1
    assert float(token_alignment(*sides, weights, *masks, 0.3)) == pytest.approx(expected, abs=1e-9)


def test_samples_without_valid_tokens_count_as_nothing_and_harm_no_gradient(sides, masks, weights):
    masks[0][2] = False
    masks[1][3] = False
    live = [side.clone().requires_grad_() for side in sides]
    loss = token_alignment(*live, weights * masks[0], *masks)
    assert float(loss.detach()) == pytest.approx(tokens_by_loops(*sides, weights, *masks, 0.1), abs=1e-9)
    loss.backward()
    for side in live:
        assert torch.isfinite(side.grad).all()
        assert not side.grad[[2, 3]].any()
        assert side.grad[[0, 1]].flatten(1).any(1).all()


def test_weights_are_clipped_to_quantiles_of_valid_tokens():
    attention = torch.rand(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(1)
    attention[0, 4] = 5.0
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 5:] = mask[2] = False
    actual = token_weights(attention, mask)
    for row, marks, result in zip(attention[:2].tolist(), mask.tolist(), actual.tolist(), strict=False):
        kept = [x for x, mark in zip(row, marks, strict=True) if mark]
        low, high = quantile(kept, 0.1), quantile(kept, 0.9)
        clipped = [min(max(x, low), high) if mark else 0.0 for x, mark in zip(row, marks, strict=True)]
        assert result == pytest.approx([x / sum(clipped) for x in clipped])
    assert not actual[2].any()
    torch.testing.assert_close(token_weights(attention[1:2, :5]), actual[1:2, :5])
    torch.testing.assert_close(token_weights(7 * attention, mask), actual)


def test_uniform_weights():
    mask = torch.tensor([[True, True, False, True], [False] * 4])
    third = 1 / 3
    assert uniform_weights(torch.zeros(2, 4, 1), mask).tolist() == [pytest.approx([third, third, 0, third]), [0.0] * 4]
    assert uniform_weights(torch.zeros(2, 4, 1)).tolist() == [[0.25] * 4] * 2


# ---- prototypes


@pytest.fixture
def pairs():
    stream = torch.Generator().manual_seed(3)
    drawn = (torch.randn(6, 4, dtype=torch.float64, generator=stream) for _ in range(2))
    return *(F.normalize(x, dim=1) for x in drawn), torch.randn(5, 4, dtype=torch.float64, generator=stream)


def test_prototypes_equal_loops(pairs):
    u, v, prototypes = pairs
    centres = [unit_vector(row) for row in prototypes.tolist()]
    scores = [[[dot(row, centre) for centre in centres] for row in side.tolist()] for side in (u, v)]
    codes = [sinkhorn(torch.tensor(side, dtype=torch.float64), 0.1, 4).tolist() for side in scores]
    total = 0.0
    for code, score in zip(codes, reversed(scores), strict=True):
        for q, row in zip(code, score, strict=True):
            foretold = softmax([x / 0.3 for x in row])
            total -= sum(a * math.log(p) for a, p in zip(q, foretold, strict=True))
    actual = prototype_alignment(u, v, prototypes, temperature=0.3, epsilon=0.1, iterations=4)
    assert float(actual) == pytest.approx(total / (2 * 6), abs=1e-9)


def test_prototypes_count_by_direction_only_and_have_a_tangential_gradient(pairs):
    u, v, prototypes = pairs
    live = prototypes.clone().requires_grad_()
    loss = prototype_alignment(u, v, live)
    assert float(prototype_alignment(u, v, 4 * prototypes)) == pytest.approx(float(loss.detach()))
    loss.backward()
    assert live.grad.any(1).all()
    torch.testing.assert_close((live.grad * prototypes).sum(1), torch.zeros(5, dtype=torch.float64))


def sinkhorn_by_loops(scores, epsilon, iterations):
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
def test_sinkhorn_equals_loops(scores, epsilon, iterations):
    expected = torch.tensor(sinkhorn_by_loops(scores, epsilon, iterations), dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(scores, epsilon, iterations), expected)


def test_both_marginals_in_the_limit(scores):
    actual = sinkhorn(scores, 0.2, 500)
    torch.testing.assert_close(actual.sum(1), torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(actual.sum(0), torch.full((4,), 6 / 4, dtype=torch.float64))
    assert not torch.allclose(sinkhorn(scores, 0.2, 1).sum(0), torch.full((4,), 1.5, dtype=torch.float64), atol=1e-3)


def test_scores_whose_exponential_overflows(scores):
    actual = sinkhorn((1000 * scores).float(), 0.05, 3)
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual, sinkhorn(1000 * scores, 0.05, 3).float(), atol=1e-4, rtol=1e-3)


def test_one_sample_belongs_to_all_alike(scores):
    torch.testing.assert_close(sinkhorn(scores[:1], 0.05, 3), torch.full((1, 4), 0.25, dtype=torch.float64))
