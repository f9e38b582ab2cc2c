"""How the rows of a study are tuned: all by one plan, which gives each the same number of candidates."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, PositiveFloat, SerializeAsAny, field_validator, model_validator

from polyfed.core.settings import Settings
from polyfed.lab.studies.column import ColumnSettings, named_column
from polyfed.runs.tunable import Ladders


class TunedKind(Settings):
    """Settings that are multiplied together."""

    paths: list[str] = Field(
        min_length=1, description="where the settings are, in those rows that have them; * stands for every name"
    )
    factors: list[PositiveFloat] = Field(
        default_factory=list,
        description="ascending factors of what a row has, 1 among them; empty: doubling and halving, without an end",
    )

    @model_validator(mode="after")
    def _is_ladder(self) -> Self:
        if self.factors and (self.factors != sorted(set(self.factors)) or 1 not in self.factors):
            raise ValueError(f"factors: {self.factors} must ascend and have a 1, what a row has")
        return self


class Tuning(Settings):
    """A pattern search, the same for every row, on validation data and on seeds of its own.

    From what a row has, kind by kind, the best candidate is compared with its neighbours, and the search goes on from a
    better one, until all neighbours of the best are tried or the candidates are spent. Candidates are whole runs, of as
    many rounds as the table's.
    """

    candidates: int = Field(default=9, ge=1, description="how many a row has at most")
    settings: dict[str, TunedKind] = Field(min_length=1, description="kind -> where its settings are")
    column: SerializeAsAny[ColumnSettings] = Field(description="what is compared; of validation data")
    seeds: list[int] = Field(default=[100], min_length=1, description="of candidates, whose mean is compared")
    at: Literal["row", "point"] = Field(
        default="row", description="row: once, at its first point, for all its points; point: at each"
    )
    set: dict[str, JsonValue] = Field(default_factory=dict, description="overrides of candidates alone")

    @field_validator("column", mode="before")
    @classmethod
    def _column(cls, value: Any) -> Any:
        return named_column(value)

    @model_validator(mode="after")
    def _fair(self) -> Self:
        if getattr(self.column, "kind", "validation") != "validation":
            raise ValueError("column: kind is test, but a choice is made on validation data")
        if "run.rounds" in self.set or "run" in self.set:
            raise ValueError("set: run.rounds: candidates have the rounds of the table; take it out")
        return self

    @property
    def in_words(self) -> str:
        """What is tuned, and how much: ``clients' rate, server's rate, 9 candidates``."""
        return f"{', '.join(self.settings)}, {self.candidates} candidates"

    @property
    def ladders(self) -> Ladders:
        return {name: (kind.paths, kind.factors) for name, kind in self.settings.items()}


def is_set_by(overrides: Mapping[str, JsonValue], path: str) -> bool:
    """Whether overrides set what is at a path."""
    return any(fnmatchcase(path, given) for given in _leaves(overrides))


def _leaves(section: Mapping[str, JsonValue], above: str = "") -> list[str]:
    leaves = []
    for key, value in section.items():
        leaves += _leaves(value, f"{above}{key}.") if isinstance(value, Mapping) else [f"{above}{key}"]
    return leaves
