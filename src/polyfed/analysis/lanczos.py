"""Lanczos' method: eigenpairs of largest magnitude of a symmetric matrix that is known by its products alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Product = Callable[[Tensor], Tensor]
"""Maps a vector [n] to the symmetric matrix times that vector [n]."""


@dataclass(frozen=True)
class Eigenpairs:
    """Eigenpairs of largest magnitude.

    Attributes:
        values: [k], descending in magnitude.
        vectors: [k, n], unit norm; the entry of largest magnitude is positive.
        residuals: [k], ||H v - lambda v||; an eigenvalue lies within that distance of ``values``.
        steps: Hessian-vector products that it took.
    """

    values: Float[Tensor, " k"]
    vectors: Float[Tensor, "k n"]
    residuals: Float[Tensor, " k"]
    steps: int


def lanczos(product: Product, start: Float[Tensor, " n"], k: int, *, steps: int, tolerance: float = 1e-3) -> Eigenpairs:
    """Lanczos' method with full reorthogonalisation (Golub and Van Loan, section 10.3).

    Where the Krylov space ends early (few distinct eigenvalues) it goes on with an axis outside it, to the last step,
    so that eigenvectors which the start vector does not contain are found too.

    Args:
        product: the symmetric matrix, as a function.
        start: not zero.
        k: number of pairs.
        steps: products at most.
        tolerance: stop when every residual is below this share of the largest eigenvalue.
    """
    basis = _Basis(start, min(steps, len(start)))
    while basis.grow(product):
        converged = basis.size >= k and bool((basis.residuals(k) <= tolerance * basis.largest).all())
        if converged and not basis.ended:
            break
    return basis.pairs(k)


class _Basis:
    """Orthonormal vectors q_1 ... q_j, and the tridiagonal matrix (alpha, beta) of the operator in their span.

    ``ended`` tells whether the Krylov space of the start vector came to its end.
    """

    def __init__(self, start: Float[Tensor, " n"], most: int) -> None:
        self.rows = torch.empty(most + 1, len(start), dtype=start.dtype, device=start.device)
        self.rows[0] = start / start.norm()
        self.alpha: list[float] = []
        self.beta: list[float] = []
        self.ended = False

    @property
    def size(self) -> int:
        """Vectors that the operator was applied to."""
        return len(self.alpha)

    @property
    def largest(self) -> float:
        """Largest magnitude among the Ritz values."""
        return float(self._ritz()[0].abs().max())

    def grow(self, product: Product) -> bool:
        """Apply the operator to the newest vector; False when there is no room for another."""
        vector = product(self.rows[self.size])
        self.alpha.append(float(self.rows[self.size].double() @ vector.double()))
        rest, norm = self._outside(vector)
        if self.size == len(self.rows) - 1:
            self.beta.append(norm)
            return False
        scale = max(map(abs, self.alpha))
        if norm <= 100 * torch.finfo(vector.dtype).eps * scale:
            rest, norm, self.ended = self._fresh(), 0.0, True
        self.beta.append(norm)
        self.rows[self.size] = rest
        return True

    def residuals(self, k: int) -> Float[Tensor, " k"]:
        """||H v - lambda v|| of the k Ritz pairs of largest magnitude: |beta_j s_j|."""
        _, weights = self._ritz()
        return (self.beta[-1] * weights[-1, :k]).abs()

    def pairs(self, k: int) -> Eigenpairs:
        """The k Ritz pairs of largest magnitude."""
        values, weights = self._ritz()
        vectors = weights[:, :k].T.to(self.rows) @ self.rows[: self.size]
        peak = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
        return Eigenpairs(
            values[:k], vectors * peak.sign() / vectors.norm(dim=1, keepdim=True), self.residuals(k), self.size
        )

    def _ritz(self) -> tuple[Float[Tensor, " j"], Float[Tensor, "j j"]]:
        """Eigenvalues, descending in magnitude, and eigenvectors (columns) of the tridiagonal matrix."""
        off = torch.tensor(self.beta[: self.size - 1], dtype=torch.float64)
        matrix = torch.diag(torch.tensor(self.alpha, dtype=torch.float64)) + off.diag(1) + off.diag(-1)
        values, vectors = torch.linalg.eigh(matrix)
        order = values.abs().argsort(descending=True)
        return values[order], vectors[:, order]

    def _outside(self, vector: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], float]:
        """The unit vector along what of ``vector`` is orthogonal to the basis, and the length of that."""
        known = self.rows[: self.size]
        for _ in range(2):  # twice is enough (Kahan)
            vector = vector - known.T @ (known @ vector)
        norm = float(vector.norm())
        return (vector / norm if norm else vector), norm

    def _fresh(self) -> Float[Tensor, " n"]:
        """A unit vector orthogonal to the basis: the axis that lies least within it."""
        known = self.rows[: self.size]
        axis = torch.zeros_like(self.rows[0])
        axis[known.square().sum(0).argmin()] = 1
        return self._outside(axis)[0]
