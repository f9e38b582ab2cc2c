"""Wall time."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.opened import Run


class Seconds(ColumnSettings):
    """Wall time of the rounds; cells run side by side, so that only those of one invocation compare, and roughly."""

    is_cost: ClassVar[bool] = True
    per: Literal["run", "round"] = "run"
    lower: bool = True
    digits: int = Field(default=1, ge=0, le=9)

    def measure(self, run: Run) -> float:
        """See ``ColumnSettings``."""
        seconds = run.records.seconds
        return sum(seconds.values()) / (max(1, len(seconds)) if self.per == "round" else 1)
