"""Costs of a run (bytes, operations, memory, wall time) and holdings of clients; shown, not judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from polyfed.core.errors import ConfigError, nearest
from polyfed.engines.local import InProcess
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.metrics import CLIENTS, Metric, TimeTo
from polyfed.reporting.tables import MIB
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER, PartitionEntry, Transfer

_OUTSIDE = ("evaluate:", "setup:")  # steps outside the method's rounds, as the ledger names them
_UNITS = {"flops": 1e6, "memory": 1e9}


Direction = Literal["up", "down", "both"]


def _of_method(run: Run) -> list[Transfer]:
    """Transfers of the method, without evaluation and preparation."""
    return [one for one in run.records.transfers if not one.step.startswith(_OUTSIDE)]


def _bytes(moved: Sequence[Transfer], direction: Direction) -> int:
    return sum(one.bytes for one in moved if direction in (one.direction, "both"))


class TrafficColumn(ColumnSettings):
    """MiB sent by the method, without evaluation of the clients; 0 for methods without clients."""

    short_name: ClassVar[str] = "traffic"
    is_outcome: ClassVar[bool] = False

    direction: Direction = "both"
    per: Literal["run", "round"] = "run"
    lower: bool = True

    def measure(self, run: Run) -> float:
        moved = _of_method(run)
        rounds = max(1, len({one.round for one in moved})) if self.per == "round" else 1
        return _bytes(moved, self.direction) / MIB / rounds


class ClientTraffic(ColumnSettings):
    """MiB per client and round, mean over a group, summed over groups."""

    short_name: ClassVar[str] = "client_traffic"
    is_outcome: ClassVar[bool] = False

    groups: list[str] = Field(min_length=1, description="groups, one client of each")
    direction: Direction = "both"
    lower: bool = True

    def require(self, experiment: Experiment) -> None:
        if unknown := [group for group in self.groups if group not in experiment.clients]:
            raise ConfigError(f"groups: no group '{unknown[0]}'; {nearest(unknown[0], experiment.clients)}")

    def measure(self, run: Run) -> float:
        total, of_method = 0.0, _of_method(run)
        for group in self.groups:
            moved = [one for one in of_method if one.client in run.records.groups[group]]
            total += _bytes(moved, self.direction) / max(1, len({(one.client, one.round) for one in moved}))
        return total / MIB


class RoundCost(ColumnSettings):
    """Operations in millions, or peak memory in GB, of the server or of one client of a group in the first round.

    For ``clients`` the sum over one client of each group.
    """

    short_name: ClassVar[str] = "cost"
    is_outcome: ClassVar[bool] = False

    figure: Literal["flops", "memory"]
    of: str = Field(default=SERVER, description="server, a group of clients, or clients for one of each group")
    lower: bool = True

    def require(self, experiment: Experiment) -> None:
        if self.of not in (valid := [SERVER, CLIENTS, *experiment.clients]):
            raise ConfigError(f"of: no group '{self.of}'; {nearest(self.of, valid)}")

    def measure(self, run: Run) -> float:
        costs = {cost.kind: getattr(cost, self.figure) for cost in _costs(run).costs}
        if self.of not in (CLIENTS, *costs):
            raise ConfigError(f"of: no client of '{self.of}' took part; {nearest(self.of, costs)}")
        own = [cost for who, cost in costs.items() if self.of == who or (self.of == CLIENTS and who != SERVER)]
        return math.nan if None in own else sum(own) / _UNITS[self.figure]


@lru_cache(maxsize=8)  # it runs a round twice
def _costs(run: Run) -> Any:
    from polyfed.lab.analysis.cost import round_costs

    return round_costs(run.experiment)


class Seconds(ColumnSettings):
    """Wall time of all rounds, or of the median round, which excludes work that one round does for all.

    Cells run in parallel, so that only those of one invocation compare, and roughly.
    """

    short_name: ClassVar[str] = "seconds"
    is_outcome: ClassVar[bool] = False

    per: Literal["run", "round"] = "run"
    lower: bool = True
    digits: int = Field(default=1, ge=0, le=9)

    def measure(self, run: Run) -> float:
        seconds = run.records.seconds.values()
        return median(seconds) if self.per == "round" else sum(seconds)


class CpuSeconds(ColumnSettings):
    """CPU seconds of the method in all rounds, independent of other load, without evaluation and saving.

    Of the run's own process: NaN if clients are in others, or the run did not record them.
    """

    short_name: ClassVar[str] = "cpu_seconds"
    is_outcome: ClassVar[bool] = False

    lower: bool = True
    digits: int = Field(default=1, ge=0, le=9)

    def measure(self, run: Run) -> float:
        return sum(_cpu(run).values()) or math.nan


def _cpu(run: Run) -> Mapping[int, float]:
    """Round -> CPU seconds."""
    return run.records.cpu if isinstance(run.experiment.run.engine, InProcess) else {}


class CostTo(TimeTo):
    """Cost of the method until a metric of the server first reached ``target``; NaN if it never did."""

    short_name: ClassVar[str] = "cost_to"
    is_outcome: ClassVar[bool] = False

    cost: Literal["MiB", "CPU seconds"]
    kind: Literal["test", "validation"] = "validation"

    def require(self, experiment: Experiment) -> None:
        if experiment.server is not None:
            Metric(metric=self.metric, kind=self.kind).require(experiment)

    def measure(self, run: Run) -> float:
        return math.nan if run.experiment.server is None else super().measure(run)

    def spent(self, run: Run) -> Mapping[int, float]:
        rounds = range(1, run.records.rounds + 1)
        if self.cost == "MiB":
            moved = _of_method(run)
            each = [sum(one.bytes for one in moved if one.round == number) / MIB for number in rounds]
        else:
            each = [_cpu(run).get(number, math.nan) for number in rounds]
        return dict(enumerate(accumulate(each, initial=0.0)))


class Holdings(ColumnSettings):
    """Items of a client, or the most or fewest of a client in a group; of a class or value, or all."""

    short_name: ClassVar[str] = "holdings"
    is_outcome: ClassVar[bool] = False

    of: str = Field(description="a client, or a group of clients")
    over: Literal["largest", "smallest"] = Field(default="largest", description="which client of a group")
    label: str | None = Field(default=None, description="items of this class alone, by the name that the partition has")
    column: str | None = Field(default=None, description="items with 'value' in this column of the partition alone")
    value: str | None = Field(default=None, description="of 'column'")
    share: bool = Field(default=False, description="percent of the client's items, in place of their number")
    digits: int = Field(default=0, ge=0, le=9)

    @model_validator(mode="after")
    def _one_part(self) -> Self:
        if (self.column is None) != (self.value is None):
            raise ValueError("column and value: give both, or neither")
        if self.label is not None and self.column is not None:
            raise ValueError("label and column: give one of them")
        return self

    def measure(self, run: Run) -> float:
        holdings = run.records.holdings
        matching = [holding for client, holding in holdings.items() if self.of in (client, holding.group)]
        if not matching:
            valid = dict.fromkeys([*(holding.group for holding in holdings.values()), *holdings])
            raise ConfigError(f"of: no client or group '{self.of}'; {nearest(self.of, valid)}")
        if self.label is not None:
            # neither a class of any client nor a combination of the partition's columns
            known = {name for holding in holdings.values() for name in holding.labels or ()}
            columns = next(iter(holdings.values())).columns
            if known and self.label not in known and not {*self.label.split("+")} <= {*columns}:
                raise ConfigError(f"label: no client holds '{self.label}'; {nearest(self.label, known)}")
        counts = [self._count(holding) for holding in matching]
        return float(max(counts) if self.over == "largest" else min(counts))

    def _count(self, holding: PartitionEntry) -> float:
        """Count of the items; 0 for a class or value without an entry."""
        if self.column is not None:
            if self.column not in holding.columns:
                valid = nearest(self.column, holding.columns)
                raise ConfigError(f"column: the partition has no '{self.column}'; {valid}")
            count = holding.columns[self.column].get(str(self.value), 0)
        elif self.label is None:
            count = holding.items
        elif holding.labels is None:
            raise ConfigError(f"label: the items of '{holding.source}' have no classes; leave it out")
        else:
            count = holding.labels.get(self.label, 0)
        return 100 * count / max(1, holding.items) if self.share else float(count)
