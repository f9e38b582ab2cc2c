"""Multi-Krum."""

from __future__ import annotations

from pydantic import Field

from polyfed.aggregation.rules.krum import Krum


class MultiKrum(Krum):
    """The mean of the m replies with the lowest Krum scores (Blanchard et al., NeurIPS 2017, section 4)."""

    kept: int | None = Field(
        default=None, ge=1, description="m, at most n - f - 2 (El Mhamdi et al., ICML 2018); None: that many"
    )

    def required(self, false: int) -> int:
        """2 f + 3, and enough for m."""
        return max(super().required(false), (self.kept or 1) + false + 2)

    def chosen(self, clients: int, false: int) -> int:
        return clients - false - 2 if self.kept is None else self.kept
