"""FedAvg of a few vectors or layers of frozen networks: prompts, and an attention behind CLIP."""

from __future__ import annotations

from typing import ClassVar

from polyfed.aggregation.averagings.tensors import ByName
from polyfed.algorithms.algorithm import WeightAveraging
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import ConfigError
from polyfed.models.adapters.adapter import AttentionModule, require_prompts
from polyfed.models.model import Model


class PromptFL(FedAvg):
    """Federated prompt learning (Guo et al., IEEE TMC 2024, Algorithm 1): FedAvg of prompts of a frozen network.

    They are averaged over all clients that have such prompts, whatever their classes.

    >>> PromptFL.needs_adapter, PromptFL().averaging.component_name()
    ('prompts', 'by_name')
    """

    short_name: ClassVar[str] = "promptfl"
    learns_by_fit: ClassVar[bool] = True
    needs_adapter: ClassVar[str] = "prompts"

    averaging: WeightAveraging = ByName()

    def add_modules(self, model: Model) -> None:
        require_prompts(model.exchanged(), self.component_name())


class FedCLIP(FedAvg):
    """FedCLIP (Lu et al., IEEE Data Engineering Bulletin 2023, section 3): FedAvg of an attention behind CLIP.

    The network is computed once; ``attention`` adapters are averaged over all clients that have them.
    """

    short_name: ClassVar[str] = "fedclip"
    learns_by_fit: ClassVar[bool] = True
    needs_adapter: ClassVar[str] = "attention"

    averaging: WeightAveraging = ByName()

    def add_modules(self, model: Model) -> None:
        if not any(isinstance(part, AttentionModule) for part in model.modules()):
            raise ConfigError(
                f"algorithm '{self.component_name()}' averages attention behind a network, and a client's model has "
                "none; give encoders 'hf' an adapter 'attention', or choose fedavg"
            )
