"""Points of many dimensions on a plane: principal components, and t-SNE."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.randomness import generator

METHODS = ("tsne", "pca")
PERPLEXITY = 30.0
MOST = 2000
"""Points that t-SNE takes: its time and memory grow with their square."""

_EXAGGERATION, _EXAGGERATED, _STEPS = 12.0, 250, 750


def require_method(method: str) -> None:
    """Raise ConfigError if there is no such projection."""
    if method not in METHODS:
        raise ConfigError(f"method '{method}'; {nearest(method, METHODS)}")


def project(x: Float[Tensor, "n d"], method: str, *purpose: int | str) -> Float[Tensor, "n 2"]:
    """Coordinates by ``tsne`` or ``pca``; ``purpose`` names the random stream.

    Raises:
        ConfigError: there is no such method.
        DataError: as the method.
    """
    require_method(method)
    return pca(x) if method == "pca" else tsne(x, *purpose)


def pca(x: Float[Tensor, "n d"], dims: int = 2) -> Float[Tensor, "n k"]:
    """The first principal components, in float64; the entry of largest magnitude of each axis is positive.

    Axes that the points do not span are 0.

    Raises:
        DataError: no points, or values that are not finite.
    """
    _require(x)
    centred = x.double().cpu() - x.double().cpu().mean(0)
    axes = torch.linalg.svd(centred, full_matrices=False).Vh[:dims].T
    peak = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    coordinates: Tensor = centred @ (axes * torch.where(peak < 0, -1.0, 1.0))
    return torch.nn.functional.pad(coordinates, (0, dims - axes.shape[1]))


def tsne(x: Float[Tensor, "n d"], *purpose: int | str, perplexity: float = PERPLEXITY) -> Float[Tensor, "n 2"]:
    """t-distributed stochastic neighbour embedding (van der Maaten and Hinton, JMLR 2008), exact.

    Starts from the first two principal components. Gradient descent with momentum 0.5, then 0.8, and gains for each
    coordinate; similarities are exaggerated twelvefold in the first 250 of 750 steps. Neighbours stay neighbours;
    distances between groups, and their sizes, say nothing.

    Args:
        x: points, at most 2,000.
        purpose: names the random stream, which only tells equal points apart.
        perplexity: effective number of neighbours; at most (n - 1) / 3 are taken.

    Raises:
        DataError: no points, too many, or values that are not finite.
    """
    _require(x)
    if len(x) > MOST:
        raise DataError(f"t-SNE of {len(x):,} points is too slow; it takes {MOST:,}; take fewer samples, or pca")
    if len(x) < 3:
        return pca(x)
    wanted = similarities(x, min(perplexity, (len(x) - 1) / 3))
    start = pca(x)
    noise = torch.randn(start.shape, generator=generator("tsne", *purpose), dtype=start.dtype)
    scale = float(start[:, 0].std()) or 1.0
    return _descend(wanted.float(), (1e-4 * start / scale + 1e-8 * noise).float()).double()


def similarities(x: Float[Tensor, "n d"], perplexity: float) -> Float[Tensor, "n n"]:
    """Joint probabilities of neighbours p_ij = (p_j|i + p_i|j) / 2n, which sum to 1."""
    conditional = neighbourhoods(x, perplexity)
    return (conditional + conditional.T) / (2 * len(x))


def neighbourhoods(x: Float[Tensor, "n d"], perplexity: float) -> Float[Tensor, "n n"]:
    """p_j|i: Gaussian weights of the neighbours j of each point i, whose width gives every row the perplexity.

    The width is found by bisection. A point with more equally close neighbours than the perplexity has these alone.
    """
    distances = torch.cdist(x.double().cpu(), x.double().cpu()).square()
    distances = distances / distances.mean().clamp(min=1e-300)
    itself = torch.eye(len(x), dtype=torch.bool)
    nearest_by = distances.masked_fill(itself, torch.inf).amin(1, keepdim=True)
    excess = (distances - nearest_by).masked_fill(itself, torch.inf)  # does not change the weights, and cannot vanish
    low, high = (torch.full((len(x), 1), edge, dtype=torch.float64) for edge in (-40.0, 40.0))
    for _ in range(60):
        middle = (low + high) / 2
        wide = _perplexities(excess, middle) > perplexity
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return torch.softmax(-excess * high.exp(), dim=1)


def _perplexities(excess: Float[Tensor, "n n"], log_precision: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    weights = torch.softmax(-excess * log_precision.exp(), dim=1)
    entropy: Tensor = torch.special.entr(weights).sum(1, keepdim=True)
    return entropy.exp()


def _descend(wanted: Float[Tensor, "n n"], y: Float[Tensor, "n 2"]) -> Float[Tensor, "n 2"]:
    """Minimise the Kullback-Leibler divergence from ``wanted`` to the similarities of y (gradient: Eq. 5)."""
    rate = max(len(y) / _EXAGGERATION / 4, 50.0)
    moved, gains = torch.zeros_like(y), torch.ones_like(y)
    exaggerated = _EXAGGERATION * wanted
    for step in range(_STEPS):
        early = step < _EXAGGERATED
        slope = _gradient(exaggerated if early else wanted, y)
        agree = slope.sign() == moved.sign()  # the last move went uphill
        gains = torch.where(agree, gains * 0.8, gains + 0.2).clamp(min=0.01)
        moved = (0.5 if early else 0.8) * moved - rate * gains * slope
        y = y + moved
        y = y - y.mean(0)
    return y


def _gradient(wanted: Float[Tensor, "n n"], y: Float[Tensor, "n 2"]) -> Float[Tensor, "n 2"]:
    squares = y.square().sum(1)
    near = torch.addmm(squares, y, y.T, alpha=-2).add_(squares[:, None]).clamp_(min=0)
    near.add_(1).reciprocal_().fill_diagonal_(0)
    pull = torch.sub(wanted, near, alpha=1 / float(near.sum())).mul_(near)
    gradient: Tensor = 4 * (pull.sum(1, keepdim=True) * y - pull @ y)
    return gradient


def _require(x: Float[Tensor, "n d"]) -> None:
    if x.ndim != 2 or not x.numel() or not bool(x.isfinite().all()):
        raise DataError(f"no projection of points of shape {tuple(x.shape)}; it needs at least one, all values finite")
