"""Top eigenvectors of a loss's Hessian, by Hessian-vector products and Lanczos' method; the matrix is never formed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.analysis.lanczos import Eigenpairs, lanczos
from polyfed.core.errors import ConfigError

Loss = Callable[[], Tensor]
"""Scalar loss of a fixed batch at the current values of the parameters."""


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention and recurrence by kernels that can be differentiated twice; the fused ones cannot."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        yield


def flat(parts: Sequence[Tensor]) -> Float[Tensor, " n"]:
    """Tensors end to end as one vector, without their graph."""
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
    parts = like(vector, parameters)
    total = torch.zeros_like(vector)
    with twice_differentiable(), torch.enable_grad():
        for loss in losses:
            total += flat(_second(loss, parameters, parts)) / len(losses)
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
    """Eigenpairs of largest magnitude of the Hessian of the mean of ``losses`` over ``parameters``.

    Holds ``steps + k`` vectors of the size of the parameters.

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
    if not 1 <= k <= min(steps, size):
        raise ConfigError(f"{k} eigenvectors of {size} parameters in {steps} steps: k must be from 1 to the lesser")
    stream = generator or torch.Generator().manual_seed(0)
    start = torch.randn(size, generator=stream).to(parameters[0])

    def product(vector: Tensor) -> Tensor:
        return hessian_product(losses, parameters, vector)

    return lanczos(product, start, k, steps=steps, tolerance=tolerance)


def _second(loss: Loss, parameters: Sequence[Tensor], parts: Sequence[Tensor]) -> Sequence[Tensor]:
    first = _gradients(loss(), parameters, create_graph=True)
    slope = torch.stack([(a * b).sum() for a, b in zip(first, parts, strict=True)]).sum()
    if not slope.requires_grad:  # the loss is linear
        return [torch.zeros_like(parameter) for parameter in parameters]
    if _ends_early(slope):
        raise ConfigError(f"{_REMEDY} (an operation of it is marked once_differentiable)")
    try:
        return _gradients(slope, parameters)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if "derivative for" not in text:
            raise
        raise ConfigError(f"{_REMEDY} ({text})") from error


_REMEDY = "this loss cannot be differentiated twice: analyse a run with another task or encoder"


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


def _gradients(value: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False) -> Sequence[Tensor]:
    return torch.autograd.grad(value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True)
