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
        return {kind: self._model(kind, old[kind], tensors, state) for kind, tensors in new.items()}

    def _model(
        self, kind: str, old: Mapping[str, Tensor], new: Mapping[str, Tensor], state: State
    ) -> dict[str, Tensor]:
        return {
            name: self.follow(old[name], value, Momenta(state, kind, name)) if _moved(old[name], value) else value
            for name, value in new.items()
        }

    @abstractmethod
    def follow(self, old: Tensor, new: Tensor, slots: Momenta) -> Tensor:
        """The next value of one floating tensor."""


class Momenta:
    """The momenta of one tensor of a type's global model."""

    def __init__(self, state: State, kind: str, name: str) -> None:
        self._state, self._kind, self._name = state, kind, name

    def get(self, what: str, like: Tensor, start: float = 0.0) -> Tensor:
        """The momentum called ``what``, at first filled with ``start``; to be changed in place."""
        group = self._state.setdefault(f"server-{what}:{self._kind}", {})
        if self._name not in group:
            group[self._name] = torch.full_like(like, start)
        elif group[self._name].device != like.device:  # read from a checkpoint
            group[self._name] = group[self._name].to(like.device)
        return group[self._name]


def _moved(old: Tensor, new: Tensor) -> bool:
    return old.is_floating_point() and new is not old
