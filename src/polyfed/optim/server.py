"""Server optimisers: how global models follow the averages of their clients (Reddi et al., ICLR 2021)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from polyfed.core.settings import Component

Models = Mapping[str, Mapping[str, Tensor]]
"""Type of clients -> global model, as named tensors."""
State = dict[str, dict[str, Tensor]]


class ServerOptimizer(Component):
    """A step from the global models towards the aggregated ones; orthogonal to how these came about.

    Subclasses live in ``polyfed.optim.servers``, one a module. The pseudo-gradient is the old model less the
    aggregated one. Integer tensors, and global models none of whose clients took part, follow the aggregate.
    """

    home: ClassVar[str] = "polyfed.optim.servers"

    @torch.no_grad()
    def step(self, old: Models, new: Models, state: State) -> dict[str, dict[str, Tensor]]:
        """The next global models.

        Args:
            old: type -> tensors, as broadcast.
            new: type -> tensors, as aggregated.
            state: lasts for the run; momenta are kept in it, as ``server-<kind>:<type>``.
        """
        models: dict[str, dict[str, Tensor]] = {}
        for kind, tensors in new.items():
            models[kind] = {}
            for name, value in tensors.items():
                before = old[kind][name]
                # the very tensor of before: nobody has moved it, so that its momenta rest too
                follows = before.is_floating_point() and value is not before
                models[kind][name] = self.follow(before, value, Momenta(state, kind, name)) if follows else value
        return models

    @abstractmethod
    def follow(self, old: Tensor, new: Tensor, slots: Momenta) -> Tensor:
        """The next value of one floating tensor."""


class Momenta:
    """The momenta of one tensor of a type's global model."""

    def __init__(self, state: State, kind: str, name: str) -> None:
        self._state, self._kind, self._name = state, kind, name

    def get(self, what: str, like: Tensor, start: float = 0.0) -> Tensor:
        """The momentum called ``what``, at first filled with ``start``; to be changed in place."""
        # in the server's state, and so in every checkpoint
        group = self._state.setdefault(f"server-{what}:{self._kind}", {})
        if self._name not in group:
            group[self._name] = torch.full_like(like, start)
        elif group[self._name].device != like.device:  # read from a checkpoint
            group[self._name] = group[self._name].to(like.device)
        return group[self._name]
