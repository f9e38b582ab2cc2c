"""FedYogi: an adaptive server step."""

from __future__ import annotations

from torch import Tensor

from polyfed.optim.adaptive import AdaptiveServer


class Yogi(AdaptiveServer):
    """FedYogi (Reddi et al., ICLR 2021, Algorithm 2): v <- v - (1 - b2) D^2 sign(v - D^2)."""

    def advance(self, second: Tensor, square: Tensor) -> None:
        second.sub_((1 - self.beta2) * square * (second - square).sign())
