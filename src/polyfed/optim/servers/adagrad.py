"""FedAdagrad: an adaptive server step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from polyfed.core.effects import Condition, Never
from polyfed.optim.adaptive import AdaptiveServer


class Adagrad(AdaptiveServer):
    """FedAdagrad (Reddi et al., ICLR 2021, Algorithm 2): v <- v + D^2."""

    only_if: ClassVar[Mapping[str, Condition]] = {"beta2": Never("its second moment is a sum")}

    def advance(self, second: Tensor, square: Tensor) -> None:
        second.add_(square)
