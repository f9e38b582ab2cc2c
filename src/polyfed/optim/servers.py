"""Server optimisers: how global models follow the averages of their clients (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.settings import Settings

Models = Mapping[str, Mapping[str, Tensor]]
"""Type of clients -> global model, as named tensors."""
State = dict[str, dict[str, Tensor]]


class ServerOptimizer(Settings):
    """A step from the global models towards the aggregated ones; orthogonal to how these came about.

    The pseudo-gradient is the old model less the aggregated one. Integer tensors, and global models none of whose
    clients took part, follow the aggregate.
    """

    home: ClassVar[str] = "polyfed.optim.servers"

    @torch.no_grad()
    def step(self, old: Models, new: Models, state: State) -> dict[str, dict[str, Tensor]]:
        """The next global models.

        Args:
            old: type -> tensors, as broadcast.
            new: type -> tensors, as aggregated.
            state: lasts for the run; momenta are kept in it, as ``server-<moment>:<type>``.
        """
        models: dict[str, dict[str, Tensor]] = {}
        for type_name, tensors in new.items():
            models[type_name] = {}
            for name, value in tensors.items():
                before = old[type_name][name]
                # the same object as before: no client has moved it, and its momenta rest too
                follows = before.is_floating_point() and value is not before
                models[type_name][name] = (
                    self.follow(before, value, Momenta(state, type_name, name)) if follows else value
                )
        return models

    @abstractmethod
    def follow(self, old: Tensor, new: Tensor, slots: Momenta) -> Tensor:
        """The next value of one floating tensor."""


class Momenta:
    """The momenta of one tensor of a type's global model."""

    def __init__(self, state: State, type_name: str, name: str) -> None:
        self._state, self._type_name, self._name = state, type_name, name

    def get(self, what: str, like: Tensor, start: float = 0.0) -> Tensor:
        """The momentum called ``what``, at first filled with ``start``; to be changed in place."""
        # in the server's state, and so in every checkpoint
        group = self._state.setdefault(f"server-{what}:{self._type_name}", {})
        if self._name not in group:
            group[self._name] = torch.full_like(like, start)
        elif group[self._name].device != like.device:  # read from a checkpoint
            group[self._name] = group[self._name].to(like.device)
        return group[self._name]


class Replace(ServerOptimizer):
    """The aggregate becomes the global model, as in FedAvg."""

    short_name: ClassVar[str] = "replace"

    def step(self, old: Models, new: Models, state: State) -> dict[str, dict[str, Tensor]]:
        return {type_name: dict(tensors) for type_name, tensors in new.items()}

    def follow(self, old: Tensor, new: Tensor, momenta: Momenta) -> Tensor:
        return new


class Momentum(ServerOptimizer):
    """FedAvgM (Hsu et al. 2019): v <- beta v + (w - aggregate), w <- w - lr v. With momentum 0, plain server SGD."""

    short_name: ClassVar[str] = "momentum"

    lr: float = Field(default=1.0, gt=0, le=100, description="server learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="beta, decay of the velocity")

    def follow(self, old: Tensor, new: Tensor, momenta: Momenta) -> Tensor:
        return old.sub(momenta.get("velocity", old).mul_(self.momentum).add_(old - new), alpha=self.lr)


class Adagrad(ServerOptimizer):
    """FedAdagrad (Reddi et al., ICLR 2021, Algorithm 2): v <- v + D^2.

    m <- b1 m + (1 - b1) D, w <- w + lr m / (sqrt(v) + tau), where D = aggregate - w. v starts at tau^2; without
    bias correction, as in the paper.
    """

    short_name: ClassVar[str] = "adagrad"

    lr: float = Field(default=0.01, gt=0, le=100, description="server learning rate")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the first moment")
    tau: float = Field(default=1e-3, gt=0, le=1, description="degree of adaptivity, added to the root")

    def follow(self, old: Tensor, new: Tensor, momenta: Momenta) -> Tensor:
        update = new - old
        first = momenta.get("first", old).lerp_(update, 1 - self.beta1)
        # at tau^2, as in the paper: from 0 the first step would be lr in every coordinate
        second = momenta.get("second", old, start=self.tau**2)
        self.advance(second, update.square())
        return old.addcdiv(first, second.sqrt().add_(self.tau), value=self.lr)

    def advance(self, second: Tensor, square: Tensor) -> None:
        """Take the square of an update into the second moment v, in place."""
        second.add_(square)


Decay = Annotated[float, Field(ge=0, lt=1, description="decay of the second moment")]


class Adam(Adagrad):
    """FedAdam (Reddi et al., ICLR 2021, Algorithm 2): as FedAdagrad, with v <- b2 v + (1 - b2) D^2."""

    short_name: ClassVar[str] = "adam"

    beta2: Decay = 0.99

    def advance(self, second: Tensor, square: Tensor) -> None:
        second.lerp_(square, 1 - self.beta2)
