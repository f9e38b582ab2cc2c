"""Projections of high-dimensional points onto a plane, by principal components or t-SNE, and draws of a few of them."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import DataError
from polyfed.core.extras import brought_by
from polyfed.core.randomness import generator

Method = Literal["tsne", "pca"]
Projection = Annotated[Method, Field(description="projection of the map")]


def drawn(count: int, most: int | None, *purpose: int | str) -> Int64[Tensor, " k"]:
    """At most ``most`` of ``count`` positions, ascending, drawn at random by ``purpose`` alone."""
    if most is None or most >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(*purpose))[:most].sort().values


def project(x: Float[Tensor, "n d"], method: Method) -> Float[Tensor, "n 2"]:
    """Coordinates by ``tsne`` or ``pca``, in float64.

    Raises:
        DataError: Points are missing, or values are not finite.
    """
    return pca(x) if method == "pca" else tsne(x)


def pca(x: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    """The first two principal components; axes that the points do not span are 0.

    Raises:
        DataError: Points are missing, or values are not finite.
    """
    with brought_by("lab"):
        from sklearn.decomposition import PCA

    if x.ndim != 2 or not x.numel() or not bool(x.isfinite().all()):
        raise DataError(f"cannot project points of shape {tuple(x.shape)}; give at least one, all values finite")
    if bool((x == x[0]).all()):  # scikit-learn would divide by a variance of 0
        return torch.zeros(len(x), 2, dtype=torch.float64)
    points = PCA(min(2, *x.shape), svd_solver="full").fit_transform(x.double().cpu().numpy())
    return torch.nn.functional.pad(torch.from_numpy(points), (0, 2 - points.shape[1]))


def tsne(x: Float[Tensor, "n d"], perplexity: float = 30.0) -> Float[Tensor, "n 2"]:
    """t-distributed stochastic neighbour embedding (van der Maaten and Hinton, JMLR 2008), by scikit-learn.

    Starts from the principal components, so that nothing is random. Neighbours stay neighbours; distances between
    groups and their sizes have no meaning.

    Args:
        x: Points.
        perplexity: Effective number of neighbours; at most (n - 1) / 3 are used.

    Raises:
        DataError: As for ``pca``.
    """
    with brought_by("lab"):
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits

    start = pca(x)
    spread = float(start[:, 0].std(correction=0))
    if len(x) < 3 or not spread:
        return start
    model = TSNE(perplexity=min(perplexity, (len(x) - 1) / 3), init=(1e-4 / spread * start).float().numpy())
    with threadpool_limits(1):  # threads sum in any order, and t-SNE amplifies the last bit
        return torch.from_numpy(model.fit_transform(x.float().cpu().numpy())).double()
