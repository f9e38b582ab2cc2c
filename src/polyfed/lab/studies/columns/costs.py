"""What a run takes: bytes, operations, memory and wall time; such columns are shown and not judged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.tables import MIB
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER, Transfer

_Direction = Literal["up", "down", "both"]
_BESIDE = ("evaluate:", "setup:")  # steps outside the method's rounds, as the ledger names them
_UNITS = {"flops": 1e6, "memory": 1e9}


class TrafficColumn(ColumnSettings):
    """MiB that the method moved, evaluation of the clients left out; 0 where clients are not asked."""

    short_name: ClassVar[str] = "traffic"
    is_outcome: ClassVar[bool] = False

    direction: _Direction = "both"
    per: Literal["run", "round"] = "run"
    lower: bool = True

    def measure(self, run: Run) -> float:
        moved = _moved(run)
        total = sum(_bytes(moved, way) for way in _ways(self.direction))
        return total / MIB / (max(1, len({one.round for one in moved})) if self.per == "round" else 1)


class ClientTraffic(ColumnSettings):
    """MiB of one client in a round in which it took part, mean over a group's; added up over groups."""

    short_name: ClassVar[str] = "client_traffic"
    is_outcome: ClassVar[bool] = False

    groups: list[str] = Field(min_length=1, description="groups, one client of each")
    direction: _Direction = "both"
    lower: bool = True

    def require(self, experiment: Experiment) -> None:
        if unknown := [group for group in self.groups if group not in experiment.clients]:
            raise ConfigError(f"groups: no group '{unknown[0]}'; {nearest(unknown[0], experiment.clients)}")

    def measure(self, run: Run) -> float:
        groups, moved = run.records.groups, _moved(run)
        return sum(self._of([one for one in moved if one.client in groups[group]]) for group in self.groups) / MIB

    def _of(self, moved: Sequence[Transfer]) -> float:
        return sum(_bytes(moved, way) for way in _ways(self.direction)) / max(1, _turns(moved))


def _moved(run: Run) -> list[Transfer]:
    """What the method moved: without evaluation of the clients and preparation."""
    return [one for one in run.records.transfers if not one.step.startswith(_BESIDE)]


def _bytes(moved: Sequence[Transfer], way: str) -> int:
    return sum(one.bytes for one in moved if one.direction == way)


def _turns(moved: Sequence[Transfer]) -> int:
    """Rounds in which clients took part, added up over clients."""
    return len({(one.client, one.round) for one in moved})


def _ways(direction: _Direction) -> tuple[str, ...]:
    return ("down", "up") if direction == "both" else (direction,)


class RoundCost(ColumnSettings):
    """Operations in millions, or peak memory in GB, of the server or of one client of a group in the first round."""

    short_name: ClassVar[str] = "cost"
    is_outcome: ClassVar[bool] = False

    figure: Literal["flops", "memory"]
    of: str = Field(default=SERVER, description="server, or a group of clients")
    lower: bool = True

    def require(self, experiment: Experiment) -> None:
        if self.of not in (valid := [SERVER, *experiment.clients]):
            raise ConfigError(f"of: no group '{self.of}'; {nearest(self.of, valid)}")

    def measure(self, run: Run) -> float:
        costs = {cost.kind: cost for cost in _costs(run).costs}
        if self.of not in costs:
            raise ConfigError(f"of: nobody in '{self.of}' took part; {nearest(self.of, costs)}")
        value = getattr(costs[self.of], self.figure)
        return float("nan") if value is None else value / _UNITS[self.figure]


@lru_cache(maxsize=8)  # a round is run twice for them
def _costs(run: Run) -> Any:
    from polyfed.lab.analysis.cost import round_costs

    return round_costs(run.experiment)


class Seconds(ColumnSettings):
    """Wall time of all rounds, or of the median round, which shows nothing of what one round computes for all.

    Cells run side by side, so that only those of one invocation compare, and roughly.
    """

    short_name: ClassVar[str] = "seconds"
    is_outcome: ClassVar[bool] = False

    per: Literal["run", "round"] = "run"
    lower: bool = True
    digits: int = Field(default=1, ge=0, le=9)

    def measure(self, run: Run) -> float:
        seconds = run.records.seconds.values()
        return median(seconds) if self.per == "round" else sum(seconds)
