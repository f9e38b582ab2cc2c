"""FedAvgM: momentum on the server."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from polyfed.optim.server import Momenta, ServerOptimizer


class Momentum(ServerOptimizer):
    """FedAvgM (Hsu et al. 2019): v <- beta v + (w - aggregate), w <- w - lr v. With momentum 0, plain server SGD."""

    lr: float = Field(default=1.0, gt=0, le=100, description="server learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="beta, decay of the velocity")

    def follow(self, old: Tensor, new: Tensor, momenta: Momenta) -> Tensor:
        velocity = momenta.get("velocity", old).mul_(self.momentum).add_(old - new)
        return old.sub(velocity, alpha=self.lr)
