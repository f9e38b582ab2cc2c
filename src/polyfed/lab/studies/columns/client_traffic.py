"""What a client of some groups moves in a round."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.analysis.traffic import WAYS, Traffic
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.tables import MIB
from polyfed.runs.opened import Run


class ClientTraffic(ColumnSettings):
    """MiB of one client in a round in which it took part, mean over a group's; added up over groups."""

    is_cost: ClassVar[bool] = True

    groups: list[str] = Field(min_length=1, description="groups, one client of each")
    direction: Literal["up", "down", "both"] = "both"
    lower: bool = True

    def measure(self, run: Run) -> float:
        """See ``ColumnSettings``."""
        groups, traffic = run.records.groups, Traffic.of(run.records)
        if unknown := [group for group in self.groups if group not in groups]:
            raise ConfigError(f"groups: no group '{unknown[0]}' in run '{run.name}'; {nearest(unknown[0], groups)}")
        return sum(self._of(traffic, groups[group]) for group in self.groups) / MIB

    def _of(self, traffic: Traffic, members: tuple[str, ...]) -> float:
        ways = WAYS if self.direction == "both" else (self.direction,)
        asked = [client for client in members if client in traffic.turns]
        moved = sum(traffic.by_client[client][way] for client in asked for way in ways)
        return moved / max(1, sum(traffic.turns[client] for client in asked))
