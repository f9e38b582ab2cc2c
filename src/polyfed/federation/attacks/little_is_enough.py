"""A little is enough."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.federation.attack import Conspiracy, by_type, require_fellows
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member


class LittleIsEnough(Conspiracy):
    """mean - z standard deviations of each coordinate (Baruch et al., NeurIPS 2019, Algorithm 3).

    Within the spread of honest clients, so that distances and medians do not tell it from them, and always to one side.
    """

    z: float | None = Field(
        default=1.5,
        gt=0,
        description="standard deviations; None: the paper's z_max of the type's numbers (``largest_z``)",
    )
    knows: Literal["all", "attackers"] = Field(
        default="all",
        description="whose replies mean and deviation are of; attackers: at least two of a type (the paper)",
    )

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that there is a deviation, and that the paper's z is above 0.

        Raises:
            ConfigError: it is not so.
        """
        names = {member.id for member in members}
        for kind in by_type(infos).values():
            false = sum(info.id in names for info in kind)
            if false and self.z is None and largest_z(len(kind), false) <= 0:
                raise ConfigError(
                    f"run.attackers.z: the paper's for {false} attackers of {len(kind)} clients ('{kind[0].group}') is "
                    f"{largest_z(len(kind), false):.2f}, which changes nothing; give a z, or more attackers"
                )
            if false and len(kind) < 2:
                raise ConfigError(
                    f"run.attackers 'little_is_enough': {kind[0].id} is alone in its type; choose another"
                )
        if self.knows == "attackers":
            require_fellows(self, members, infos, "to know how replies vary")

    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        known = torch.stack(list(everybody if self.knows == "all" else attackers)).double()
        z = largest_z(len(everybody), len(attackers)) if self.z is None else self.z
        return (known.mean(0) - z * known.std(0, unbiased=False)).to(everybody[0])


def largest_z(clients: int, false: int) -> float:
    """z_max: the most deviations at which enough honest clients lie beyond the attackers to make them the majority.

    s = floor(n / 2 + 1) - f honest ones are needed, so z is the (n - f - s) / (n - f) quantile of a normal one.
    """
    needed = clients // 2 + 1 - false
    share = (clients - false - needed) / (clients - false) if clients > false else 1.0
    return NormalDist().inv_cdf(min(max(share, 1e-9), 1 - 1e-9))
