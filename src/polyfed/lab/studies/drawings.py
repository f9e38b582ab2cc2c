"""What a study's figures show: a column over something, or where a claim holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from polyfed.core.settings import Settings
from polyfed.lab.studies.claims import Claim
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.metric import Metric
from polyfed.lab.studies.study_files import require_known
from polyfed.runs.records import SERVER

Columns = Mapping[str, ColumnSettings]


class Drawing(Settings):
    """A figure: a column over an axis, over rounds (of the server), over another column, or as bars by row."""

    column: str
    over: str = Field(
        default="rows",
        description="an axis, another column, round (the curve of a metric of the server), or rows (bars)",
    )
    minus: bool = Field(
        default=False, description="paired differences to 'against', with their 95 % intervals; over rows or an axis"
    )

    def require(self, where: str, columns: Columns, axes: Collection[str]) -> None:
        """Raise ValueError if a study has not what it shows; the message begins with ``where``."""
        require_known(f"{where}.column", [self.column], columns)
        is_of_server = isinstance(column := columns[self.column], Metric) and column.of == SERVER
        others = [] if self.minus else [*(["round"] if is_of_server else []), *columns]
        require_known(f"{where}.over", [self.over], ["rows", *axes, *others])


class RegimeMap(Settings):
    """A figure: where over the axes of a study a claim holds, where the opposite does, and where it is open."""

    map: str = Field(description="a claim without a point")
    x: str = Field(description="the axis of the columns")
    y: str | None = Field(default=None, description="the axis of the rows; null: there is one row")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.claim.labels != {""}:
            raise ValueError(f"map: '{self.map}' names a point; a map shows a claim at all points, so leave it out")
        if self.claim.is_of_spreads:
            raise ValueError(f"map: '{self.map}' compares spreads; a map shows means")
        if self.x == self.y:
            raise ValueError(f"y: '{self.y}' is x already; give another axis, or null")
        return self

    @property
    def claim(self) -> Claim:
        return Claim.parse(self.map)

    @property
    def axes(self) -> tuple[str, ...]:
        return (self.x,) if self.y is None else (self.x, self.y)

    def require(self, where: str, columns: Columns, axes: Collection[str]) -> None:
        """As of ``Drawing``; the study looks at the claim."""
        require_known(where, self.axes, axes)
        if left := {*axes} - {*self.axes}:
            raise ValueError(f"{where}: a map shows all axes of a study, which are two at most; name '{min(left)}'")


def _kind(value: Any) -> str:
    return "map" if "map" in (value if isinstance(value, Mapping) else type(value).model_fields) else "column"


AnyDrawing = Annotated[
    Annotated[Drawing, Tag("column")] | Annotated[RegimeMap, Tag("map")],
    Discriminator(_kind),
]
