"""What a study's figures show: a column over something, or where a claim holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from polyfed.core.settings import Settings
from polyfed.lab.studies.claims import Claim


class Drawing(Settings):
    """A figure: a column over an axis, over rounds, over another column, or as bars by row."""

    column: str
    over: str = Field(default="rows", description="an axis, another column, round (the metric's curve), or rows (bars)")
    minus: bool = Field(
        default=False, description="paired differences to 'against', with their 95 % intervals; over rows or an axis"
    )


class RegimeMap(Settings):
    """A figure: where over two axes a claim holds, where the opposite does, and where it is open."""

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


def _kind(value: Any) -> str:
    is_map = "map" in value if isinstance(value, Mapping) else isinstance(value, RegimeMap)
    return "map" if is_map else "drawing"


AnyDrawing = Annotated[
    Annotated[Drawing, Tag("drawing")] | Annotated[RegimeMap, Tag("map")],
    Discriminator(_kind),
]
