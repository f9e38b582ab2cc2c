"""One interface for sums of which the server sees nothing but the result, and their twin in the clear."""

from __future__ import annotations

from importlib.util import find_spec
from math import floor
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from polyfed.core.errors import ConfigError
from polyfed.core.extras import how_to_install
from polyfed.core.settings import Settings
from polyfed.privacy.masking.fixed_point import FixedPoint

FEWEST = 3
"""Clients of a type below which a sum tells one client the value of another."""


def _threshold(value: int | float) -> int | float:
    if isinstance(value, float) and not 0.5 < value <= 1:
        raise ValueError("threshold is a share of a type's clients (above 0.5, up to 1.0) or a number (whole)")
    if isinstance(value, int) and value < 2:
        raise ValueError(f"threshold is {value}; two clients or more must agree, and more than half of a type")
    return value


class SecureSum(Settings):
    """How clients of a type (one architecture, task and classes) add up replies as whole numbers modulo 2^bits."""

    home: ClassVar[str] = "polyfed.privacy.secure_sum"
    masks: ClassVar[bool] = True
    """Whether what a client sends is masked."""

    range: float = Field(
        default=64.0,
        gt=0,
        le=1e9,
        allow_inf_nan=False,
        description="largest magnitude of a value that is summed; who has a larger one is left out",
    )
    bits: Literal[32, 64] = Field(
        default=32, description="of each number; a unit of the sum is range / 2^(bits - 2), 6e-8 by default"
    )
    threshold: Annotated[int | float, AfterValidator(_threshold)] = Field(
        default=2 / 3,
        description="clients of a type without whom nothing is unmasked: a number, or a share (rounded up); always "
        "more than half of them",
    )

    @property
    def numbers(self) -> FixedPoint:
        return FixedPoint(self.range, self.bits)

    def required(self, clients: int) -> int:
        """t, of so many clients of a type that exchange keys."""
        # 2 / 3 of 9 is 6, although the product may be a bit more
        wanted = self.threshold if isinstance(self.threshold, int) else -floor(-self.threshold * clients + 1e-9)
        return max(wanted, clients // 2 + 1, 2)

    def require(self) -> None:
        """Check that what it takes is installed.

        Raises:
            ConfigError: it is not.
        """


class PairwiseMasks(SecureSum):
    """Masks that cancel in the sum, and one of each client's own (Bonawitz et al., CCS 2017, section 4 and figure 4).

    Client u sends x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv) modulo 2^k. The s_uv come of keys that
    the two agree on each round; of b_u and of u's key every client holds a share. t clients give the b of those who
    replied and the keys of those who did not, never both of one.
    """

    short_name: ClassVar[str] = "pairwise_masks"

    def require(self) -> None:
        """Check that the package with the ciphers is there.

        Raises:
            ConfigError: it is not.
        """
        if find_spec("cryptography") is None:
            raise ConfigError(
                "aggregation.secure 'pairwise_masks' needs the package 'cryptography', which is not installed; "
                f"{how_to_install('deploy')}"
            )


class Unmasked(SecureSum):
    """The same whole numbers without masks or keys: the server sees every reply. To compare with, bit for bit."""

    short_name: ClassVar[str] = "unmasked"
    masks: ClassVar[bool] = False
