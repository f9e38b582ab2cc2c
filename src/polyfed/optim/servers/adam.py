"""FedAdam: an adaptive server step."""

from __future__ import annotations

from torch import Tensor

from polyfed.optim.adaptive import AdaptiveServer


class Adam(AdaptiveServer):
    """FedAdam (Reddi et al., ICLR 2021, Algorithm 2): v <- b2 v + (1 - b2) D^2."""

    def advance(self, second: Tensor, square: Tensor) -> None:
        second.lerp_(square, 1 - self.beta2)
