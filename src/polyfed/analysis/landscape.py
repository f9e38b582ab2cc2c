"""Loss landscape around trained weights, along two directions (FedCola, appendix B.7)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polyfed.analysis.hessian import Loss, flat, like
from polyfed.core.errors import ConfigError


def landscape(
    losses: Sequence[Loss],
    parameters: Sequence[Tensor],
    directions: Float[Tensor, "2 n"],
    *,
    grid: int = 21,
    extent: float = 0.5,
) -> Float[Tensor, "grid grid"]:
    """Mean of ``losses`` at theta + a v_1 + b v_2; entry [i, j] is at a = axis[i], b = axis[j].

    The parameters are moved in place, and have their former values afterwards, bit for bit, whatever happens.

    Args:
        losses: one for each fixed batch.
        parameters: leaves that the losses depend on.
        directions: v_1 and v_2 over all parameters, flattened in their order.
        grid: points along each direction; odd, so that the middle is theta itself.
        extent: a and b go from -extent to extent (``axis_of``).

    Raises:
        ConfigError: grid or extent make no grid around theta.
    """
    axis = axis_of(grid, extent)
    home = flat(parameters)
    values = torch.empty(grid, grid, dtype=torch.float64)
    with torch.no_grad(), _restored(parameters):
        for i, a in enumerate(axis.tolist()):
            for j, b in enumerate(axis.tolist()):
                _put(parameters, home + a * directions[0] + b * directions[1] if a or b else home)
                values[i, j] = sum(float(loss()) for loss in losses) / len(losses)
    return values


def axis_of(grid: int, extent: float) -> Float[Tensor, " grid"]:
    """Coordinates along one direction, in units of the weights' L2 norm; the middle one is exactly 0.

    Raises:
        ConfigError: grid is not an odd number from 3 on, or extent is not positive.
    """
    if grid < 3 or grid % 2 == 0:
        raise ConfigError(f"grid {grid} has no middle with points around it; give an odd number from 3 on, such as 21")
    if not 0 < extent < float("inf"):
        raise ConfigError(f"extent {extent} must be positive and finite, such as 1.0")
    half = grid // 2
    return torch.arange(-half, half + 1, dtype=torch.float64) * (extent / half)


@contextlib.contextmanager
def _restored(parameters: Sequence[Tensor]) -> Iterator[None]:
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)


def _put(parameters: Sequence[Tensor], values: Float[Tensor, " n"]) -> None:
    for parameter, piece in zip(parameters, like(values, parameters), strict=True):
        parameter.copy_(piece)
