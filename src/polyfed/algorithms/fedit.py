"""FedIT."""

from __future__ import annotations

from typing import ClassVar

from polyfed.aggregation.averagings.low_rank import Separate
from polyfed.algorithms.algorithm import WeightAveraging
from polyfed.algorithms.fedavg import FedAvg


class FedIT(FedAvg):
    """Federated instruction tuning (Zhang et al., ICASSP 2024, Algorithm 1): FedAvg of low-rank adapters.

    Factors A and B of each layer are averaged apart, over all clients that have the layer, whatever else they have.
    """

    learns_by_fit: ClassVar[bool] = True

    averaging: WeightAveraging = Separate()
