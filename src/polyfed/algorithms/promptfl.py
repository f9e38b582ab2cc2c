"""PromptFL."""

from __future__ import annotations

from typing import ClassVar

from polyfed.aggregation.averagings.by_name import ByName
from polyfed.algorithms.algorithm import WeightAveraging
from polyfed.algorithms.fedavg import FedAvg
from polyfed.models.adapters.prompts import require_prompts
from polyfed.models.model import Model


class PromptFL(FedAvg):
    """Federated prompt learning (Guo et al., IEEE TMC 2024, Algorithm 1): FedAvg of prompts of a frozen network.

    They are averaged over all clients that have such prompts, whatever their classes.
    """

    learns_by_fit: ClassVar[bool] = True
    needs_adapter: ClassVar[str] = "prompts"

    averaging: WeightAveraging = ByName()

    def add_modules(self, model: Model) -> None:
        require_prompts(model.exchanged(), self.component_name())
