"""FedAdagrad: an adaptive server step."""

from __future__ import annotations

from torch import Tensor

from polyfed.optim.adaptive import AdaptiveServer


class Adagrad(AdaptiveServer):
    """FedAdagrad (Reddi et al., ICLR 2021, Algorithm 2): v <- v + D^2."""

    def advance(self, second: Tensor, square: Tensor) -> None:
        """Take the square of an update into the second moment, in place."""
        second.add_(square)
