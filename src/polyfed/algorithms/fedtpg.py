"""FedTPG."""

from __future__ import annotations

from typing import ClassVar

from polyfed.aggregation.averagings.by_name import ByName
from polyfed.algorithms.algorithm import WeightAveraging
from polyfed.algorithms.fedavg import FedAvg
from polyfed.models.adapters.prompts import require_generator
from polyfed.models.model import Model


class FedTPG(FedAvg):
    """Text-driven prompt generation (Qiu et al., ICLR 2024, Algorithm 1): FedAvg of a network that makes prompts.

    It makes them from the names of a client's classes, so that it serves classes that nobody trained on. It is averaged
    over all clients that have one, whatever their classes.
    """

    learns_by_fit: ClassVar[bool] = True
    needs_adapter: ClassVar[str] = "prompt_generator"

    averaging: WeightAveraging = ByName()

    def add_modules(self, model: Model) -> None:
        require_generator(model, self.component_name())
