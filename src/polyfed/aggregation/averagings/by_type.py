"""Averages within each type of clients."""

from __future__ import annotations

from polyfed.aggregation.averaging import Averaging


class ByType(Averaging):
    """w <- sum_k n_k w_k / sum_k n_k over the clients of each type (McMahan et al. 2017, Algorithm 1).

    Types exchange nothing.
    """
