"""Copies of one reply."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polyfed.federation.attack import Conspiracy, require_fellows
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member


class Copied(Conspiracy):
    """All attackers of a type send what the first has learnt, which then counts as often as they are (Sybils)."""

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that there is somebody to copy.

        Raises:
            ConfigError: there is not.
        """
        require_fellows(self, members, infos, "to copy one")

    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        return attackers[0].clone()
