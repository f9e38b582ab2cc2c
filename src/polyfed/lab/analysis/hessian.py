"""Top eigenvectors of a loss's Hessian, from Hessian-vector products alone; the matrix is never formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core.errors import ConfigError

Loss = Callable[[], Tensor]
"""Scalar loss of a fixed batch at the current values of the parameters."""

_SHORT = 10  # vectors of the first Krylov space; often enough, as the top eigenvalues of a network stand out
_REMEDY = "this loss cannot be differentiated twice: analyse a run with another task or encoder"


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


def flat(parts: Sequence[Tensor]) -> Float[Tensor, " n"]:
    return torch.cat([part.detach().reshape(-1) for part in parts])


def like(vector: Float[Tensor, " n"], parameters: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``flat``: pieces of the vector in the shapes of the parameters."""
    pieces = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]


def hessian_product(
    losses: Sequence[Loss], parameters: Sequence[Tensor], vector: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """H v for the Hessian of the mean of ``losses``, by differentiating grad(L) . v (Pearlmutter 1994).

    The graph of one batch is held at a time.

    Raises:
        ConfigError: the loss cannot be differentiated twice.
    """
    parts, total = like(vector, parameters), torch.zeros_like(vector)
    # the fused kernels of attention and of cuDNN's recurrent networks have no second derivative
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False), torch.enable_grad():
        for loss in losses:
            total += flat(_second_derivative(loss, parameters, parts)) / len(losses)
    return total


def top_eigenvectors(
    losses: Sequence[Loss],
    parameters: Sequence[Tensor],
    k: int = 2,
    *,
    steps: int = 40,
    tolerance: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Eigenpairs of largest magnitude of the Hessian of the mean of ``losses`` over ``parameters``, by ARPACK.

    Two Krylov spaces at most: a short one, then one that begins with what the first found and takes the steps that are
    left. Holds as many vectors of the size of the parameters as the larger has.

    Args:
        losses: one for each fixed batch.
        parameters: leaves that require gradients, of one dtype, on one device; not changed.
        k: number of pairs.
        steps: Hessian-vector products at most.
        tolerance: stop when every residual is below this share of the largest eigenvalue.
        generator: of the start vector, on the CPU; by default seeded with 0.

    Raises:
        ConfigError: k or steps do not suit the number of parameters, or the loss cannot be differentiated twice.
    """
    size = sum(parameter.numel() for parameter in parameters)
    if not 1 <= k <= min(steps // 2 - 1, size - 1):
        raise ConfigError(
            f"{k} eigenvectors of {size} parameters in {steps} steps: it takes at least {2 * k + 2} steps, and more "
            "parameters than eigenvectors, of which there must be one"
        )
    start = torch.randn(size, generator=generator or torch.Generator().manual_seed(0)).to(parameters[0])

    def product(vector: Tensor) -> Tensor:
        return hessian_product(losses, parameters, vector)

    beside = k + 1  # products that a space takes beyond its vectors: ARPACK's start, and the residuals
    pairs = _krylov(product, start, k, min(max(_SHORT, k + 1), size, steps - beside))
    left = min(steps - pairs.steps - beside, size)
    if left > k and bool((pairs.residuals > tolerance * pairs.values.abs().max()).any()):
        better = _krylov(product, pairs.vectors.sum(0), k, left)
        pairs = replace(better, steps=pairs.steps + better.steps)
    return pairs


def _krylov(product: Callable[[Tensor], Tensor], start: Float[Tensor, " n"], k: int, space: int) -> Eigenpairs:
    """The best pairs of the Krylov space of ``start`` with so many vectors."""
    import numpy as np
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    steps = 0

    def by_numpy(vector: Any) -> Any:
        nonlocal steps
        steps += 1
        return product(torch.from_numpy(vector.reshape(-1)).to(start)).cpu().numpy()

    operator = LinearOperator((len(start), len(start)), matvec=by_numpy, dtype=start.cpu().numpy().dtype)
    try:
        # a tolerance of 1 takes what one space holds; by default ARPACK gives nothing where that is not enough
        values, columns = eigsh(operator, k, v0=start.cpu().numpy(), ncv=space, maxiter=1, tol=1.0)
    except ArpackError:  # no curvature along the start, hence no space; the residuals tell if there is any elsewhere
        values, columns = np.zeros(k), np.eye(len(start), k, dtype=operator.dtype)
    order = np.argsort(-abs(values))
    values, vectors = values[order], np.ascontiguousarray(columns[:, order].T)
    residuals = [np.linalg.norm(by_numpy(v) - value * v) for value, v in zip(values, vectors, strict=True)]
    signs = np.sign(np.take_along_axis(vectors, abs(vectors).argmax(1)[:, None], axis=1))
    return Eigenpairs(
        torch.from_numpy(values).double(),
        torch.from_numpy(vectors * signs).to(start),
        torch.tensor(residuals, dtype=torch.float64),
        steps,
    )


def _second_derivative(loss: Loss, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
    def gradients(value: Tensor, *, create_graph: bool = False) -> Sequence[Tensor]:
        return torch.autograd.grad(
            value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )

    first = gradients(loss(), create_graph=True)
    slope = torch.stack([(a * b).sum() for a, b in zip(first, parts, strict=True)]).sum()
    if not slope.requires_grad:  # the loss is linear
        return [torch.zeros_like(parameter) for parameter in parameters]
    if _ends_early(slope):
        raise ConfigError(f"{_REMEDY} (an operation of it is marked once_differentiable)")
    try:
        return gradients(slope)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "derivative for" not in text:
            raise
        raise ConfigError(f"{_REMEDY} ({text})") from error


def _ends_early(value: Tensor) -> bool:
    """Whether the graph has an operation without second derivative: torch would count it as constant, silently."""
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if node.name().rpartition("::")[2] == "Error":
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False
