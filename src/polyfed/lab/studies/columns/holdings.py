"""What clients hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.opened import Run
from polyfed.runs.records import PartitionEntry


class Holdings(ColumnSettings):
    """Items that a client holds, or the most or fewest that one of a group does; of a class or value, or all."""

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
            self._require_known(self.label, list(holdings.values()))
        counts = [self._count(holding) for holding in matching]
        return float(max(counts) if self.over == "largest" else min(counts))

    def _require_known(self, label: str, holdings: Sequence[PartitionEntry]) -> None:
        """Raise ConfigError for a class that nobody has, and that no combination of the partition's columns is."""
        known = {name for holding in holdings for name in holding.labels or ()}
        if known and label not in known and not {*label.split("+")} <= {*holdings[0].columns}:
            raise ConfigError(f"label: no client holds '{label}'; {nearest(label, known)}")

    def _count(self, holding: PartitionEntry) -> float:
        count = float(self._items(holding))
        return 100 * count / max(1, holding.items) if self.share else count

    def _items(self, holding: PartitionEntry) -> int:
        """A class or value that the client does not hold is not among its counts."""
        if self.column is not None:
            if self.column not in holding.columns:
                valid = nearest(self.column, holding.columns)
                raise ConfigError(f"column: the partition has no '{self.column}'; {valid}")
            return holding.columns[self.column].get(str(self.value), 0)
        if self.label is None:
            return holding.items
        if holding.labels is None:
            raise ConfigError(f"label: the items of '{holding.source}' have no classes; leave it out")
        return holding.labels.get(self.label, 0)
