"""Clients as members of clusters, coalitions and portfolios: pure functions for MMiC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

_GRID = 1000  # steps that the weights of a game are counted in


def count_sketch(change: Mapping[str, Tensor], width: int, stream: torch.Generator) -> Float[Tensor, " w"]:
    """A count sketch of a client's change of weights, of unit norm: coordinates with random signs summed in ``width``
    bins, so that cosines of sketches are about those of the changes. Equal streams give comparable sketches."""
    bins = torch.zeros(width)
    for name in sorted(change):
        values = change[name].detach().flatten().cpu().float()
        place = torch.randint(width, values.shape, generator=stream)
        sign = torch.randint(2, values.shape, generator=stream) * 2 - 1
        bins.index_add_(0, place, sign * values)
    unit: Tensor = bins / torch.linalg.vector_norm(bins).clamp_min(1e-12)
    return unit


def cluster_numbers(points: Float[Tensor, "k w"], count: int) -> list[int]:
    """Number of the cluster of each point, of at most ``count`` by average linkage of their distances.

    >>> cluster_numbers(torch.tensor([[0.0], [0.1], [5.0]]), 2)
    [1, 1, 2]
    """
    if len(points) < 2:
        return [1] * len(points)
    from scipy.cluster.hierarchy import fcluster, linkage

    return [int(number) for number in fcluster(linkage(points.numpy(), "average"), count, "maxclust")]


def banzhaf(weights: Float[Tensor, " k"], quota: float = 0.5) -> Float[Tensor, " k"]:
    """The normalised Banzhaf power index of each player of a weighted voting game (Banzhaf 1965).

    A player is critical in a coalition that wins with it and loses without it; the index is its share of all critical
    places. Coalitions win with more than ``quota`` of all weight. Weights are counted in thousandths of their sum.

    >>> banzhaf(torch.tensor([3.0, 2.0, 1.0, 1.0])).tolist()
    [0.5, 0.16666666666666666, 0.16666666666666666, 0.16666666666666666]
    """
    total = float(weights.sum())
    if not total > 0:
        return torch.full((len(weights),), 1 / max(1, len(weights)), dtype=torch.float64)
    steps = [round(_GRID * float(weight) / total) for weight in weights]
    enough = quota * sum(steps)
    sizes = torch.arange(sum(steps) + 1)
    critical = torch.zeros(len(steps), dtype=torch.float64)
    for player, step in enumerate(steps):
        chances = _coalitions([other for k, other in enumerate(steps) if k != player], len(sizes))
        critical[player] = chances[(sizes <= enough) & (sizes + step > enough)].sum()
    if not float(critical.sum()) > 0:  # so many players that each weighs less than a step
        return torch.full_like(critical, 1 / len(critical))
    return critical / critical.sum()


def _coalitions(steps: Sequence[int], size: int) -> Float[Tensor, " s"]:
    """Share of all coalitions of some players that weigh 0, 1, ... together."""
    shares = torch.zeros(size, dtype=torch.float64)
    shares[0] = 1.0
    for step in steps:
        shares = (shares + shares.roll(step)) / 2  # no coalition weighs more than all, so nothing rolls round
    return shares


def portfolio_cost(returns: Float[Tensor, "k t"], shares: Float[Tensor, " k"], risk: float = 0.5) -> float:
    """Markowitz's cost of a portfolio (1952): risk x variance - (1 - risk) x return.

    Args:
        returns: of each asset in the last rounds, the latest last.
        shares: of the assets, of sum 1.
        risk: weight of the variance, w' S w with the sample covariance S, which is 0 of fewer than two rounds.
    """
    centred = returns - returns.mean(1, keepdim=True)
    covariance = centred @ centred.T / max(1, returns.shape[1] - 1)
    return float(risk * (shares @ covariance @ shares) - (1 - risk) * (shares @ returns[:, -1]))
