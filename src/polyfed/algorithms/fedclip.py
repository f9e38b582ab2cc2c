"""FedCLIP."""

from __future__ import annotations

from typing import ClassVar

from polyfed.aggregation.averagings.by_name import ByName
from polyfed.algorithms.algorithm import WeightAveraging
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import ConfigError
from polyfed.models.adapters.features import AttentionModule
from polyfed.models.model import Model


class FedCLIP(FedAvg):
    """FedCLIP (Lu et al., IEEE Data Engineering Bulletin 2023, section 3): FedAvg of an attention behind CLIP.

    The network is computed once; ``attention`` adapters are averaged over all clients that have them.
    """

    learns_by_fit: ClassVar[bool] = True
    needs_adapter: ClassVar[str] = "attention"

    averaging: WeightAveraging = ByName()

    def add_modules(self, model: Model) -> None:
        if not any(isinstance(part, AttentionModule) for part in model.modules()):
            raise ConfigError(
                f"algorithm '{self.component_name()}' averages attention behind a network, and a client's model has "
                "none; give encoders 'hf' an adapter 'attention', or choose fedavg"
            )
