"""Weights of clients that lean towards those with high losses, within a ball around equal weights.

FedAID / FedDRA (arXiv 2404.03854): w <- Proj(w e^{gamma v} / sum), Proj onto {w in the simplex: D(n w || 1) <= rho}.
All are in float64, on the device of what they get, without gradients; n numbers, one a client.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int64, Real
from torch import Tensor

Divergence = Literal["chi_square", "none", "released"]
"""Constraint that keeps the weights near each other; released: ``released_chi_square_projection``."""

_BISECTION_STEPS = 64  # halvings of log s: from any bracket within float64 to its last bit
SMALLEST_WEIGHT = torch.finfo(torch.float64).tiny


def chi_square(w: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """||n w - 1||^2 / 2n, the chi-square divergence from equal weights (Namkoong and Duchi 2016).

    0 for equal weights, (n - 1) / 2 where one client has all.

    >>> float(chi_square(torch.tensor([0.5, 0.5]))), float(chi_square(torch.tensor([1.0, 0.0])))
    (0.0, 0.5)
    """
    return (len(w) * w - 1).square().sum() / (2 * len(w))


def chi_square_projection(v: Real[Tensor, " n"], rho: float) -> Float[Tensor, " n"]:
    """The nearest point of the simplex with ``chi_square`` of at most ``rho``, in Euclidean distance.

    With a multiplier lambda of the ball, w = SimplexProj(v, 1 + lambda n) / (1 + lambda n). In s = 1 / (1 + lambda n)
    this is SimplexProj(s v, 1), equal weights at s = 0 and the projection without a ball at s = 1, and its
    divergence grows with s: the largest s that fits is bisected. The feasible end is returned, so the ball is kept
    to the last bit down to the rounding of the divergence itself, about 1e-32.

    Args:
        v: any finite numbers.
        rho: radius; 0 gives equal weights, (n - 1) / 2 and more the nearest point of the simplex.

    Raises:
        ValueError: ``v`` is not a non-empty vector of finite numbers, or ``rho`` is negative or NaN.

    >>> v = torch.tensor([1.0, 0.0])
    >>> [round(float(chi_square_projection(v, rho)[0]), 3) for rho in (0.0, 0.02, 0.5)]
    [0.5, 0.6, 1.0]
    """
    return _in_chi_square_ball(_finite(v, "v"), _radius(rho))


def released_chi_square_projection(v: Real[Tensor, " n"], rho: float) -> Float[Tensor, " n"]:
    """Projection of FedDRA's public code in place of ``chi_square_projection``; it can leave the ball.

    That code takes its routine from the public code of Namkoong and Duchi and bounds the multiplier by
    1 + lambda n <= n max(v) / sqrt(2 rho + 1). The bound would hold if SimplexProj subtracted a threshold of at
    least 0; with lambda > 0 it may add one. So s >= sqrt(2 rho + 1) / (n max(v)), and where the ball
    needs a smaller s that end comes out. Inside the simplex its divergence is at most (2 rho + 1) / 8:
    from rho = 1/6 on both routines agree there for every v, below only where no weight is far above the others.

    This is the exact routine with that bracket, written anew. The public code returns the middle of a last
    bracket of relative width 1e-10, this the feasible end of a narrower one.

    Raises:
        ValueError: as ``chi_square_projection``; also rho = 0, that the public code refuses.

    >>> v = torch.tensor([1.0, 0.0])
    >>> [round(float(released_chi_square_projection(v, rho)[0]), 3) for rho in (0.02, 0.5)]
    [0.755, 1.0]
    """
    if rho == 0:
        raise ValueError("rho is 0; the released routine needs it positive")
    v, rho = _finite(v, "v"), _radius(rho)
    lowest = math.sqrt(2 * rho + 1) / (len(v) * v.max()).clamp(min=SMALLEST_WEIGHT)
    return _in_chi_square_ball(v, rho, lowest.clamp(max=1))


def mirror_step(
    w: Real[Tensor, " n"], v: Real[Tensor, " n"], gamma: float, rho: float, divergence: Divergence = "chi_square"
) -> Float[Tensor, " n"]:
    """Weights after one round: Proj(w e^{gamma v} / sum w e^{gamma v}) (FedAID Eq. 4), for losses of any size.

    A weight of 0 stays 0 in the product; only a projection that binds can raise it.

    >>> mirror_step(torch.ones(2), torch.tensor([0.0, 1.0]), gamma=1.0, rho=0.02)
    tensor([0.4000, 0.6000], dtype=torch.float64)

    Args:
        w: weights so far, not negative; they are made to sum to 1.
        v: loss of each client.
        gamma: step size, at least 0; 0 only projects. FedDRA's public code has 0.01 times 50 local steps.
        rho: radius of the ball, at least 0; unused with ``none``.
        divergence: ``chi_square`` with the Euclidean projection, ``released`` for FedDRA's public code, ``none`` for no
            ball.

    Returns:
        Weights that sum to 1; [1] for one client.

    Raises:
        ValueError: weights or losses are not vectors of n finite numbers (the first bad index is named), a weight is
            negative, all are 0, gamma or rho is out of range, or the divergence is unknown.
    """
    w, v = _weights(w), _finite(v, "v")
    if len(w) != len(v):
        raise ValueError(f"there are {len(w)} weights and {len(v)} losses; give one of each a client")
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma is {gamma}; it must be finite and not negative")
    # relative to the highest loss that counts, so that no exponent overflows
    counted = w > 0
    losses = (v - v[counted].max()).clamp(min=-torch.finfo(v.dtype).max)
    logs = (w.log() + gamma * losses).masked_fill(~counted, -math.inf)
    match divergence:
        case "chi_square":
            return chi_square_projection(logs.softmax(0), rho)
        case "released":
            return released_chi_square_projection(logs.softmax(0), rho)
        case "none":
            return logs.softmax(0)
    raise ValueError(f"divergence is '{divergence}'; valid: {', '.join(get_args(Divergence))}")


def mirror_step_of(
    w: Real[Tensor, " n"],
    present: Bool[Tensor, " n"] | Int64[Tensor, " m"],
    v: Real[Tensor, " m"],
    gamma: float,
    rho: float,
    divergence: Divergence = "chi_square",
) -> Float[Tensor, " n"]:
    """``mirror_step`` in a round in which only some clients reported a loss; the weights of the others stay.

    The present clients keep the mass that they hold together, and ``mirror_step`` moves it among them: their shares
    of it and the divergence are those of a federation of m clients. The bound therefore holds for these shares,
    not for all n weights, which can drift further apart over rounds with different clients.

    Args:
        w: weights of all clients, not negative; their sum is kept.
        present: a mask of the clients that reported, or their indices.
        v: their losses, in ascending order of clients for a mask, else in the order of the indices.
        gamma: step size, see ``mirror_step``.
        rho: radius, see ``mirror_step``.
        divergence: constraint, see ``mirror_step``.

    Returns:
        New weights of all clients; ``w`` itself in float64 where no client is present or the present hold nothing.

    Raises:
        ValueError: ``mirror_step`` refuses the values, or a client is unknown or named twice.

    >>> w, present, losses = torch.full((3,), 1 / 3), torch.tensor([0, 2]), torch.tensor([0.0, 1.0])
    >>> mirror_step_of(w, present, losses, gamma=1.0, rho=0.02).round(decimals=3)
    tensor([0.2670, 0.3330, 0.4000], dtype=torch.float64)
    """
    w = _weights(w)
    index = _indices(present, len(w)).to(w.device)
    if v.shape != index.shape:
        raise ValueError(f"{len(index)} clients are present and the losses have shape {tuple(v.shape)}; give one each")
    if not len(index):
        return w
    v, shares = _finite(v, "v"), w[index]
    # absent clients keep theirs: nothing is known of their losses
    mass = shares.sum()
    if mass == 0:
        return w
    return w.index_copy(0, index, mass * mirror_step(shares, v, gamma, rho, divergence))


def nearest_in_simplex(v: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The nearest point with w >= 0 and sum w = 1, in Euclidean distance (Duchi et al. 2008, Fig. 1)."""
    # what lies more than 1 below the highest gets nothing; cutting it off keeps the sums accurate
    gaps = (v - v.max()).clamp(min=-1.0)
    ranks = torch.arange(1, len(v) + 1, device=v.device, dtype=v.dtype)
    thresholds = (gaps.sort(descending=True).values.cumsum(0) - 1.0) / ranks
    # the threshold of k clients rises as long as the k-th gets a weight, and falls from there
    return (gaps - thresholds.max()).clamp(min=0)


def _in_chi_square_ball(
    v: Float[Tensor, " n"], rho: float, lowest: Float[Tensor, ""] | None = None
) -> Float[Tensor, " n"]:
    """SimplexProj(s v, 1) for the largest s in [``lowest``, 1] that fits; None: from an s that surely does.

    Halves the ratio of the ends, so that s of any magnitude comes out to full precision; never waits for the device.
    """
    gaps = (v - v.max()).clamp(min=-torch.finfo(v.dtype).max)
    if lowest is None:
        # no weight is further than s times the spread of v from 1/n, so D <= n^2 (s spread)^2 / 2
        lowest = (math.sqrt(2 * rho) / len(v) / (-gaps.min()).clamp(min=SMALLEST_WEIGHT)).clamp(max=1)
    high = torch.ones_like(lowest)
    low = torch.where(chi_square(nearest_in_simplex(high * gaps)) <= rho, high, lowest)
    for _ in range(_BISECTION_STEPS):
        # the root of a product would under- or overflow
        middle = low.sqrt() * high.sqrt()
        fits = chi_square(nearest_in_simplex(middle * gaps)) <= rho
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return nearest_in_simplex(low * gaps)


def _finite(v: Real[Tensor, " n"], name: str) -> Float[Tensor, " n"]:
    """Copy in float64."""
    if v.ndim != 1 or not len(v):
        raise ValueError(f"{name} has shape {tuple(v.shape)}; give a vector, one number a client")
    values = v.detach().to(torch.float64, copy=True)
    if not bool(values.isfinite().all()):
        at = int(values.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"{name}[{at}] is {values[at].item()}; leave out clients without a finite value")
    return values


def _weights(w: Real[Tensor, " n"]) -> Float[Tensor, " n"]:
    weights = _finite(w, "w")
    if bool((weights < 0).any()):
        at = int((weights < 0).nonzero()[0])
        raise ValueError(f"w[{at}] is {weights[at].item()}; a weight must not be negative")
    if not bool((weights > 0).any()):
        raise ValueError(f"w is 0 for all {len(weights)} clients; at least one must have a positive weight")
    return weights


def _radius(rho: float) -> float:
    if not rho >= 0:
        raise ValueError(f"rho is {rho}; it must not be negative")
    return rho


def _indices(present: Bool[Tensor, " n"] | Int64[Tensor, " m"], clients: int) -> Int64[Tensor, " m"]:
    if present.dtype == torch.bool:
        if present.shape != (clients,):
            raise ValueError(f"present has shape {tuple(present.shape)}; the mask must be of {clients} clients")
        return present.nonzero().flatten()
    index = present.flatten().to(torch.int64)
    unknown = [k for k in index.tolist() if not 0 <= k < clients]
    if unknown:
        raise ValueError(f"present names client {unknown[0]}; valid: 0 to {clients - 1}")
    if len(set(index.tolist())) < len(index):
        raise ValueError(f"present names a client twice: {index.tolist()}")
    return index
