"""FlexLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polyfed.aggregation.averagings.low_rank import SingularValues
from polyfed.algorithms.algorithm import WeightAveraging
from polyfed.algorithms.fedavg import FedAvg


class FlexLoRA(FedAvg):
    """Low-rank adapters of unequal ranks (Bai et al., NeurIPS 2024, Algorithm 1).

    The server averages the changes B A themselves, and sends each client the nearest factors of its own rank.
    """

    takes_late_replies: ClassVar[bool] = False
    learns_by_fit: ClassVar[bool] = True

    averaging: WeightAveraging = SingularValues()

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {}
