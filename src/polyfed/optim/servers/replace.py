"""The plain server step: global models are the averages."""

from __future__ import annotations

from torch import Tensor

from polyfed.optim.server import Models, Momenta, ServerOptimizer, State


class Replace(ServerOptimizer):
    """The aggregate becomes the global model, as in FedAvg."""

    def step(self, old: Models, new: Models, state: State) -> dict[str, dict[str, Tensor]]:
        return {kind: dict(tensors) for kind, tensors in new.items()}

    def follow(self, old: Tensor, new: Tensor, momenta: Momenta) -> Tensor:
        return new
