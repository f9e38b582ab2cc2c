"""What crossed between server and clients."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyfed.lab.analysis.traffic import WAYS, Traffic
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.tables import MIB
from polyfed.runs.opened import Run


class TrafficColumn(ColumnSettings):
    """MiB that the method moved, evaluation of the clients left out; 0 where clients are not asked."""

    is_cost: ClassVar[bool] = True
    direction: Literal["up", "down", "both"] = "both"
    per: Literal["run", "round", "client"] = Field(
        default="run", description="client: of one client in a round in which it took part, mean"
    )
    lower: bool = True

    def measure(self, run: Run) -> float:
        """See ``ColumnSettings``."""
        if not run.records.transfers:
            return 0.0
        traffic = Traffic.of(run.records)
        ways = WAYS if self.direction == "both" else (self.direction,)
        moved = sum(traffic.a_round(way) if self.per == "client" else traffic.total(way) for way in ways)
        return moved / MIB / (traffic.rounds if self.per == "round" else 1)
