"""The adaptive server optimisers of Reddi et al. (ICLR 2021, Algorithm 2), which differ in the second moment alone."""

from __future__ import annotations

from abc import abstractmethod

from pydantic import Field
from torch import Tensor

from polyfed.optim.server import Momenta, ServerOptimizer


class AdaptiveServer(ServerOptimizer):
    """m <- b1 m + (1 - b1) D, v by the subclass, w <- w + lr m / (sqrt(v) + tau), where D = aggregate - w.

    v starts at tau^2; there is no bias correction, as in the paper.
    """

    lr: float = Field(default=0.01, gt=0, le=100, description="server learning rate")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of the second moment; not for adagrad")
    tau: float = Field(default=1e-3, gt=0, le=1, description="degree of adaptivity, added to the root")

    def follow(self, old: Tensor, new: Tensor, momenta: Momenta) -> Tensor:
        """The next value of one tensor."""
        update = new - old
        first = momenta.get("first", old).lerp_(update, 1 - self.beta1)
        # at tau^2, as in the paper: from 0 the first step would be lr in every coordinate
        second = momenta.get("second", old, start=self.tau**2)
        self.advance(second, update.square())
        return old.addcdiv(first, second.sqrt().add_(self.tau), value=self.lr)

    @abstractmethod
    def advance(self, second: Tensor, square: Tensor) -> None:
        """Take the square of an update into the second moment, in place."""
