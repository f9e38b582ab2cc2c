"""The beta distribution and Student's t, for intervals and tests."""

from __future__ import annotations

import math
from functools import cache

LEVEL = 0.95
"""Level of intervals."""

_CLOSE = 1e-15
_MOST_TERMS = 100_000


def beta_share(x: float, a: float, b: float) -> float:
    """Share of the beta distribution below x, the regularised incomplete beta function I_x(a, b), for positive a and b.

    By the continued fraction 8.17.22 of the Digital Library of Mathematical Functions and the method of Lentz (1976).
    """
    if x <= 0:
        return 0.0
    if x > (a + 1) / (a + b + 2):  # beyond the mean, where the fraction of the other side converges faster
        return 1 - beta_share(1 - x, b, a)
    above, below = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = below
    for k in range(2, _MOST_TERMS):
        m = k // 2
        factor = -(a + m) * (a + b + m) if k % 2 else m * (b - m)
        term = x * factor / ((a + k - 1) * (a + k))
        above, below = 1 + term / above, 1 / (1 + term * below)
        fraction *= above * below
        if abs(above * below - 1) < _CLOSE and k % 2:
            break
    size = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    return math.exp(a * math.log(x) + b * math.log1p(-x) - size) / a * fraction


def beta_quantile(share: float, a: float, b: float) -> float:
    """Point below which ``beta_share`` is a share within (0, 1), to the last bit, by bisection."""
    low, high = 0.0, 1.0
    while low < (x := (low + high) / 2) < high:
        low, high = (low, x) if beta_share(x, a, b) > share else (x, high)
    return low


@cache  # it takes milliseconds, and tables ask for few degrees very often
def student_reach(degrees: float, level: float = LEVEL) -> float:
    """Half width, in standard errors, of the central interval of Student's t that holds a share ``level`` of draws."""
    share = beta_quantile(level, 0.5, degrees / 2)
    return math.sqrt(degrees * share / (1 - share))


def student_beyond(reach: float, degrees: float) -> float:
    """Two-sided p of Student's t: probability of a value further from 0 than ``reach``; NaN of NaN."""
    square = reach * reach
    if math.isnan(square):
        return math.nan
    if square < 1:  # the other sum would lose digits
        return 1 - beta_share(square / (degrees + square), 0.5, degrees / 2)
    return beta_share(degrees / (degrees + square), degrees / 2, 0.5)


def share_interval(value: float, trials: float) -> tuple[float, float]:
    """95 % interval of a share of independent trials, both in percent (Clopper and Pearson 1934).

    >>> [tuple(round(end, 1) for end in share_interval(80.0, trials)) for trials in (10, 1000)]
    [(44.4, 97.5), (77.4, 82.4)]
    """
    if not math.isfinite(value):
        return math.nan, math.nan
    hits = value / 100 * trials
    misses, tail = trials - hits, (1 - LEVEL) / 2
    low = beta_quantile(tail, hits, misses + 1) if hits > 1e-9 else 0.0
    high = beta_quantile(1 - tail, hits + 1, misses) if misses > 1e-9 else 1.0
    return 100 * low, 100 * high
