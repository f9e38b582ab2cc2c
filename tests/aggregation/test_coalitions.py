"""Clusters, power and portfolios against their definitions."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch.nn import functional as F

from polyfed.aggregation.coalitions import banzhaf, cluster_numbers, count_sketch, portfolio_cost
from polyfed.core.randomness import generator


@pytest.mark.parametrize(
    "weights", [[3, 2, 1, 1], [1, 1, 1], [5, 1, 1, 1], [4, 3, 2, 2, 1], [1], [2, 0, 1], [9, 8, 7, 3, 1, 1]]
)
@pytest.mark.parametrize("quota", [0.5, 0.7])
def test_power_is_counted_over_all_coalitions(weights: list[int], quota: float) -> None:
    total, critical = sum(weights), [0] * len(weights)
    for size in range(len(weights) + 1):
        for coalition in combinations(range(len(weights)), size):
            weight = sum(weights[player] for player in coalition)
            for player in coalition if weight > quota * total else ():
                critical[player] += weight - weights[player] <= quota * total
    expected = [one / sum(critical) for one in critical]
    assert banzhaf(torch.tensor(weights, dtype=torch.float64), quota).tolist() == pytest.approx(expected, abs=1e-9)


def test_without_weight_all_are_alike() -> None:
    assert banzhaf(torch.zeros(4)).tolist() == [0.25] * 4
    assert banzhaf(torch.zeros(0)).tolist() == []


def test_a_portfolio_s_cost_is_its_variance_less_its_return() -> None:
    returns = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 4.0]], dtype=torch.float64)
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    of_portfolio = shares @ returns
    expected = 0.3 * float(of_portfolio.var()) - 0.7 * float(of_portfolio[-1])
    assert portfolio_cost(returns, shares, 0.3) == pytest.approx(expected)
    assert portfolio_cost(returns[:, :1], shares, 1.0) == 0.0


def test_sketches_keep_cosines_and_clusters_tell_directions_apart() -> None:
    torch.manual_seed(0)
    way = torch.randn(2, 4000)
    changes = [{"a": one[:1000].view(10, 100), "b": one[1000:]} for one in (way[0], 2 * way[0] + 0.1 * way[1], way[1])]
    sketches = torch.stack([count_sketch(change, 256, generator(0, "s")) for change in changes])
    assert torch.allclose(sketches.norm(dim=1), torch.ones(3))
    expected = F.cosine_similarity(way[0], 2 * way[0] + 0.1 * way[1], dim=0)
    assert float(sketches[0] @ sketches[1]) == pytest.approx(float(expected), abs=0.05)
    assert abs(float(sketches[0] @ sketches[2])) < 0.3
    one, other, third = cluster_numbers(sketches, 2)
    assert one == other != third
    assert cluster_numbers(sketches[:1], 2) == [1]
    assert len(set(cluster_numbers(sketches, 1))) == 1
    assert not count_sketch({"a": torch.zeros(5)}, 8, generator(0)).any()
