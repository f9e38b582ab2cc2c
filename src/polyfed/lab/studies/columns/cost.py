"""What a round costs a participant."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER

_UNITS = {"flops": 1e6, "memory": 1e9}


class RoundCost(ColumnSettings):
    """Operations in millions, or peak memory in GB, of the server or of one client of a group in the first round."""

    is_cost: ClassVar[bool] = True

    figure: Literal["flops", "memory"]
    of: str = Field(default=SERVER, description="server, or a group of clients")
    lower: bool = True

    def measure(self, run: Run) -> float:
        """See ``ColumnSettings``."""
        costs = {cost.kind: cost for cost in _costs(run).costs}
        if self.of not in costs:
            raise ConfigError(f"of: nobody in '{self.of}' took part; {nearest(self.of, costs)}")
        value = getattr(costs[self.of], self.figure)
        return float("nan") if value is None else value / _UNITS[self.figure]


@lru_cache(maxsize=8)  # a round is run twice for them
def _costs(run: Run) -> Any:
    from polyfed.lab.analysis.cost import round_costs

    return round_costs(run.experiment)
