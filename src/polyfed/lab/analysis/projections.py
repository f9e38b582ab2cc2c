"""Points of many dimensions on a plane: which, and by principal components or t-SNE."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.extras import brought_by
from polyfed.core.randomness import generator

METHODS = ("tsne", "pca")
PERPLEXITY = 30.0


def drawn(count: int, most: int | None, *purpose: int | str) -> Int64[Tensor, " k"]:
    """At most ``most`` of ``count`` positions, ascending, drawn at random by ``purpose`` alone."""
    if most is None or most >= count:
        return torch.arange(count)
    return torch.randperm(count, generator=generator(*purpose))[:most].sort().values


def require_method(method: str) -> None:
    """Raise ConfigError if there is no such projection."""
    if method not in METHODS:
        raise ConfigError(f"method '{method}'; {nearest(method, METHODS)}")


def project(x: Float[Tensor, "n d"], method: str) -> Float[Tensor, "n 2"]:
    """Coordinates by ``tsne`` or ``pca``, in float64.

    Raises:
        ConfigError: there is no such method.
        DataError: no points, or values that are not finite.
    """
    require_method(method)
    return pca(x) if method == "pca" else tsne(x)


def pca(x: Float[Tensor, "n d"]) -> Float[Tensor, "n 2"]:
    """The first two principal components; axes that the points do not span are 0.

    Raises:
        DataError: no points, or values that are not finite.
    """
    with brought_by("lab"):
        from sklearn.decomposition import PCA

    if x.ndim != 2 or not x.numel() or not bool(x.isfinite().all()):
        raise DataError(f"no projection of points of shape {tuple(x.shape)}; it needs at least one, all values finite")
    if bool((x == x[0]).all()):  # one point, or none apart: scikit-learn would divide by 0
        return torch.zeros(len(x), 2, dtype=torch.float64)
    places = PCA(min(2, *x.shape), svd_solver="full").fit_transform(x.double().cpu().numpy())
    return torch.nn.functional.pad(torch.from_numpy(places), (0, 2 - places.shape[1]))


def tsne(x: Float[Tensor, "n d"], perplexity: float = PERPLEXITY) -> Float[Tensor, "n 2"]:
    """t-distributed stochastic neighbour embedding (van der Maaten and Hinton, JMLR 2008), by scikit-learn.

    Starts from the principal components, so that nothing is drawn. Neighbours stay neighbours; distances between
    groups, and their sizes, say nothing.

    Args:
        x: points.
        perplexity: effective number of neighbours; at most (n - 1) / 3 are taken.

    Raises:
        DataError: as ``pca``.
    """
    with brought_by("lab"):
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    start = pca(x)
    spread = float(start[:, 0].std(correction=0))
    if len(x) < 3 or not spread:
        return start
    model = TSNE(perplexity=min(perplexity, (len(x) - 1) / 3), init=(1e-4 / spread * start).float().numpy())
    with threadpool_limits(1):  # threads add up in any order, and t-SNE makes another map of the last bit
        return torch.from_numpy(model.fit_transform(x.float().cpu().numpy())).double()


def class_means(
    x: Float[Tensor, "n d"], codes: Int64[Tensor, " n"]
) -> tuple[Float[Tensor, "c d"], Int64[Tensor, " c"]]:
    """Mean and number of the points of each class 0 ... c - 1, in float64."""
    counts = torch.bincount(codes)
    sums = torch.zeros(len(counts), x.shape[1], dtype=torch.float64).index_add_(0, codes, x.double())
    return sums / counts[:, None], counts
