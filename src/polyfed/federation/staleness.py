"""How much a late reply counts, by how many server steps were taken since its client was asked."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from pydantic import Field

from polyfed.core.settings import Settings


class Staleness(Settings):
    """s(tau), the weight of a reply of staleness tau: 1 for a fresh one, never more, never less for a fresher one."""

    home: ClassVar[str] = "polyfed.federation.staleness"

    @abstractmethod
    def weight(self, tau: int) -> float:
        """s(tau), in (0, 1].

        Args:
            tau: server steps between the model that the client started from and that of now; 0: none.
        """


class ConstantStaleness(Staleness):
    """1: late replies count as others do (Xie et al. 2019, section 5.2)."""

    short_name: ClassVar[str] = "constant"

    def weight(self, tau: int) -> float:
        return 1.0


class Polynomial(Staleness):
    """(1 + tau)^-a (Xie et al. 2019, section 5.2); with a = 1/2 FedBuff's 1 / sqrt(1 + tau) (Nguyen et al. 2022)."""

    short_name: ClassVar[str] = "polynomial"

    a: float = Field(default=0.5, gt=0, le=10, description="exponent")

    def weight(self, tau: int) -> float:
        return float((1.0 + tau) ** -self.a)


class Hinge(Staleness):
    """1 up to a staleness of b, then 1 / (a (tau - b) + 1) (Xie et al. 2019, section 5.2)."""

    short_name: ClassVar[str] = "hinge"

    a: float = Field(default=10.0, gt=0, description="how fast the weight falls beyond b")
    b: int = Field(default=4, ge=0, description="staleness up to which replies count in full")

    def weight(self, tau: int) -> float:
        return 1.0 if tau <= self.b else 1.0 / (self.a * (tau - self.b) + 1.0)
