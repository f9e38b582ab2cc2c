"""Early stopping: the best state of a module, and when to give up waiting for a better one."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Stopping:
    """Keeps a module's state at its lowest validation loss.

    Args:
        module: what is trained.
        patience: epochs without a lower loss after which ``done`` says so.
    """

    def __init__(self, module: nn.Module, patience: int) -> None:
        self._module, self._patience = module, patience
        self._best: dict[str, Tensor] | None = None
        self._lowest, self._waited = math.inf, 0

    def done(self, loss: float) -> bool:
        """Take note of an epoch's validation loss; whether to stop. NaN counts as no improvement."""
        if loss < self._lowest:
            self._lowest, self._waited = loss, 0
            self._best = {name: value.detach().clone() for name, value in self._module.state_dict().items()}
        else:
            self._waited += 1
        return self._waited >= self._patience

    def restore(self) -> None:
        """Bring back the best state; nothing if no loss was told."""
        if self._best is not None:
            self._module.load_state_dict(self._best)
