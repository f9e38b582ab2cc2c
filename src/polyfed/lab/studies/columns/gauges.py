"""Gauges of whether a method's mechanism could act in a run; shown below a table, never judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, field_validator

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.studies.column import ColumnSettings, named_column
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER

_ROUNDS = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}


class Gauge(ColumnSettings):
    """A figure, or a figure minus another, explained by ``reads``.

    NaN for a run whose method has no such part.
    """

    short_name: ClassVar[str] = "gauge"
    is_outcome: ClassVar[bool] = False

    shows: SerializeAsAny[ColumnSettings] = Field(description="the figure, any other column")
    minus: SerializeAsAny[ColumnSettings] | None = Field(default=None, description="a column to subtract")
    reads: str = Field(description="meaning and unit, in plain words")
    above: float | None = Field(default=None, description="from here up 'then' holds")
    below: float | None = Field(default=None, description="from here down 'then' holds")
    then: str = Field(default="", description="consequence beyond the limits, in plain words")
    digits: int = Field(default=1, ge=0, le=9)

    @field_validator("shows", "minus", mode="before")
    @classmethod
    def _column(cls, value: Any) -> Any:
        return named_column(value)

    @property
    def parts(self) -> list[ColumnSettings]:
        """The figure, and the subtracted one."""
        return [part for part in (self.shows, self.minus) if part is not None]

    @property
    def identity(self) -> dict[str, Any]:
        """Identity of the figures alone, as words and limits do not change them."""
        return {"name": self.component_name(), "parts": [part.identity for part in self.parts]}

    @property
    def in_words(self) -> str:
        """``percent of equal weights' entropy; from 99 up GCA cannot act``."""
        ways = {"up": self.above, "down": self.below}
        limits = [f"from {limit:g} {way}" for way, limit in ways.items() if limit is not None]
        return f"{self.reads}; {' and '.join(limits)} {self.then}" if limits else self.reads

    def is_beyond(self, value: float) -> bool:
        """True if a figure is beyond a limit, so that ``then`` holds."""
        return (self.above is not None and value >= self.above) or (self.below is not None and value <= self.below)

    def require(self, experiment: Experiment) -> None:
        for part in self.parts:
            part.require(experiment)

    @property
    def needs_models(self) -> bool:
        return any(part.needs_models for part in self.parts)

    def is_at_hand(self, folder: Path) -> bool:
        return all(part.is_at_hand(folder) for part in self.parts)

    def measure(self, run: Run) -> float:
        try:
            first, *second = (part.measure(run) for part in self.parts)
        except ConfigError:  # the method has no such part
            return math.nan
        return first - sum(second)


class Recorded(ColumnSettings):
    """A metric that the server recorded, mean over rounds, or the difference among several.

    ``mean`` in their own unit; ``spread``, standard deviation in percent of their mean (0: all alike); ``departure``,
    mean distance of each share of their sum from an equal share, in percent of that (0: all alike; 200 (1 - 1 / n): one
    of n has all).
    """

    short_name: ClassVar[str] = "recorded"
    is_outcome: ClassVar[bool] = False

    metric: str = Field(description="its name, such as teacher.r1_sum; * stands for any text, as in loss.*")
    over: Literal["mean", "spread", "departure"] = Field(default="mean", description="statistic over several")
    round: Literal["first", "last", "all"] = Field(default="all", description="rounds with a record")

    def measure(self, run: Run) -> float:
        records = run.records
        known = records.metric_names(SERVER, "train")
        series = [records.series(SERVER, name, "train") for name in known if fnmatchcase(name, self.metric)]
        if not series:
            valid = nearest(self.metric, known)
            raise ConfigError(f"metric: the server of '{run.name}' recorded no '{self.metric}'; {valid}")
        rounds = sorted({number for one in series for number in one})[_ROUNDS[self.round]]
        return fmean(self._figure([one[number] for one in series if number in one]) for number in rounds)

    def _figure(self, values: Sequence[float]) -> float:
        mean = fmean(values)
        if self.over == "mean":
            return mean
        if not mean:
            return math.nan
        if self.over == "spread":
            return 100 * pstdev(values) / abs(mean)
        return 100 * fmean(abs(value / mean - 1) for value in values)
