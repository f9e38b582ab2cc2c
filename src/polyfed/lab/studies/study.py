"""Studies: the runs of a table or a figure, tuning of rows, columns, and claims."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    PositiveFloat,
    SerializeAsAny,
    Tag,
    field_validator,
    model_validator,
)

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import Settings, parse_settings
from polyfed.lab.studies.claims import ALL, Claim, Claims, Operand
from polyfed.lab.studies.column import ColumnSettings, named_column
from polyfed.lab.studies.search import Ladders
from polyfed.lab.studies.study_files import merged_study, require_known, setting_label, study_content
from polyfed.reporting.statistics import FEWEST_SEEDS
from polyfed.runs.twins import TwinSettings

SMALL, SMOKE = "small", "smoke"


class TunedSettings(Settings):
    """Settings that are multiplied together."""

    paths: list[str] = Field(
        min_length=1, description="paths of the settings, in rows that have them; * stands for every name"
    )
    factors: list[PositiveFloat] = Field(
        default_factory=list,
        description="ascending factors of a row's value, with 1; empty: doubling and halving, unlimited",
    )
    rows: list[str] = Field(default_factory=list, description="the rows that search it; empty: all rows that have it")

    @model_validator(mode="after")
    def _is_ladder(self) -> Self:
        if self.factors and (self.factors != sorted(set(self.factors)) or 1 not in self.factors):
            raise ValueError(f"factors: {self.factors} must ascend and contain 1, the row's own value")
        return self


class Tuning(Settings):
    """A search of settings, the same for every row: each seed chooses on its own validation, and then trains.

    Kind by kind, twice and half of a row's value are tried, and values beyond the better one while it improves
    (``PatternSearch``). Candidates are complete runs, of as many rounds as the table's. Other tables of a paper use,
    seed by seed, the choices of the main table: ``table``.
    """

    settings: dict[str, TunedSettings] = Field(default_factory=dict, description="kind -> its settings")
    candidates: int = Field(default=5, ge=1, description="most values of each kind per row, its own included")
    column: SerializeAsAny[ColumnSettings] | None = Field(
        default=None, description="the compared column, on validation"
    )
    at: Literal["row", "point"] = Field(
        default="row", description="row: once, at its first point, for all points; point: at each point"
    )
    set: dict[str, JsonValue] = Field(default_factory=dict, description="overrides of candidates alone")
    table: str | None = Field(default=None, description="study file of the main table, in place of its own search")
    default_row: str | None = Field(default=None, description="row of the main table for rows that it lacks")
    scale: str = Field(default=SMALL, description="scale of 'table'; that of this study")

    @field_validator("column", mode="before")
    @classmethod
    def _column(cls, value: Any) -> Any:
        return None if value is None else named_column(value)

    @model_validator(mode="after")
    def _fair(self) -> Self:
        if (self.table is None) != bool(self.settings and self.column):
            raise ValueError("give 'settings' with 'column', or 'table'")
        if getattr(self.column, "kind", "validation") != "validation":
            raise ValueError("column: kind is test, but a choice is made on validation data")
        if "run.rounds" in self.set or "run" in self.set:
            raise ValueError("set: run.rounds: candidates have the rounds of the table; take it out")
        return self

    @property
    def in_words(self) -> str:
        """``clients' rate, server's rate, by seed``, or the main table."""
        return f"as {Path(self.table).stem} chose" if self.table else f"{', '.join(self.settings)}, by seed"

    def ladders(self, row: str) -> Ladders:
        """Settings that a row searches."""
        own = {name: group for name, group in self.settings.items() if not group.rows or row in group.rows}
        return {name: (group.paths, group.factors) for name, group in own.items()}


def is_set_by(overrides: Mapping[str, JsonValue], path: str) -> bool:
    """True if overrides set a path."""
    return any(fnmatchcase(path, given) for given in _leaves(overrides))


def _leaves(section: Mapping[str, JsonValue], above: str = "") -> list[str]:
    leaves = []
    for key, value in section.items():
        leaves += _leaves(value, f"{above}{key}.") if isinstance(value, Mapping) else [f"{above}{key}"]
    return leaves


Columns = Mapping[str, ColumnSettings]


ROUND = "round"


class Drawing(Settings):
    """A figure: a column over an axis, over other columns, or as bars by row; or validation by round."""

    column: str
    over: str | list[str] = Field(
        default="rows",
        description="an axis, rows (bars), other columns, such as costs, a panel each; or round: validation by round",
    )
    minus: bool = Field(
        default=False, description="paired differences to 'against', with their 95 % intervals; over rows or an axis"
    )

    def require(self, where: str, columns: Columns, axes: Collection[str]) -> None:
        """Raise ValueError if a study lacks its columns or axes; the message begins with ``where``."""
        require_known(f"{where}.column", [self.column], columns)
        others = [] if self.minus else [*columns]
        if isinstance(self.over, list):
            require_known(f"{where}.over", self.over, others)
        else:
            require_known(f"{where}.over", [self.over], ["rows", *axes, *([] if self.minus else [ROUND]), *others])


class RegimeMap(Settings):
    """A figure: the verdict on a claim at each point of a study's axes."""

    map: str = Field(description="a claim without a point")
    x: str = Field(description="the axis of the columns")
    y: str | None = Field(default=None, description="the axis of the rows; null: there is one row")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.claim.labels != {""}:
            raise ValueError(f"map: '{self.map}' names a point; a map shows a claim at all points, so leave it out")
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
        """See ``Drawing.require``; the study checks the claim."""
        require_known(where, self.axes, axes)
        if left := {*axes} - {*self.axes}:
            raise ValueError(f"{where}: a map shows all axes of a study, at most two; name '{min(left)}'")


def _form(value: Any) -> str:
    return "map" if "map" in (value if isinstance(value, Mapping) else type(value).model_fields) else "column"


AnyDrawing = Annotated[Annotated[Drawing, Tag("column")] | Annotated[RegimeMap, Tag("map")], Discriminator(_form)]


Overrides = dict[str, JsonValue]
"""Dotted path of a setting -> value, as ``polyfed run --set`` takes them."""

Point = tuple[str, ...]
"""A label of each axis, in order; empty for a study without axes."""

_SEPARATOR = ", "
_SMOKE_ROUNDS = {"run.rounds": 1}


def point_label(point: Point) -> str:
    """A point in words: ``0.1, 500``."""
    return _SEPARATOR.join(point)


class Axis(Settings):
    """A setting and its values, or points of several settings by label."""

    setting: str | None = Field(default=None, description="dotted path of the setting")
    values: list[JsonValue] = Field(default_factory=list, description="its values")
    points: dict[str, Overrides] = Field(default_factory=dict, description="label -> overrides, in place of values")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if bool(self.points) == bool(self.setting and self.values):
            raise ValueError("give 'setting' with 'values', or 'points'")
        return self

    @property
    def overrides(self) -> dict[str, Overrides]:
        """Label -> overrides."""
        return self.points or {setting_label(value): {str(self.setting): value} for value in self.values}


_ALL = "*"


class Row(Settings):
    """One line of a table: a method, a twin or another preset."""

    like: str | None = Field(default=None, description="row whose base, groups, twin and overrides are inherited")
    base: str | None = Field(default=None, description="preset or file in place of the study's")
    groups: list[str] | None = Field(default=None, min_length=1, description="client groups to keep; null: all")
    twin: TwinSettings | None = Field(default=None, description="a twin of the row")
    set: Overrides = Field(default_factory=dict, description="overrides")
    only: dict[str, list[JsonValue]] = Field(default_factory=dict, description="axis -> labels to run")
    main: bool = Field(default=True, description="false: run after all main rows")
    tune: bool | str = Field(
        default=True, description="false: not tuned; name of a row of the main table ('tuning.table'): use its choices"
    )
    columns: dict[str, Overrides | None] = Field(
        default_factory=dict,
        description="column -> settings that differ in this row; null: not measured; * stands for all others",
    )

    @field_validator("twin", mode="before")
    @classmethod
    def _by_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @property
    def differs_in_groups_alone(self) -> bool:
        return not (self.set or self.twin or self.base)

    def beneath(self, other: Row) -> Row:
        """``other`` on top of this row."""
        given = {name: getattr(other, name) for name in other.model_fields_set}
        laid = {name: {**getattr(self, name), **getattr(other, name)} for name in ("set", "columns")}
        return self.model_copy(update={**given, **laid, "like": None})


class Paper(Settings):
    """The item of a paper that a study reproduces."""

    paper: str
    item: str = Field(description="such as Table 1")


class Study(Settings):
    """A base experiment, rows x axes x seeds, columns and claims."""

    title: str
    description: str = ""
    source: Paper | None = None
    base: str | dict[str, Any] = Field(description="preset, file or experiment that every row starts from")
    set: Overrides = Field(default_factory=dict, description="overrides of all cells")
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1, description="a list, or their number from 0 on")
    rows: dict[str, Row] = Field(min_length=1)
    columns: dict[str, SerializeAsAny[ColumnSettings]] = Field(min_length=1)
    axes: dict[str, Axis] = Field(default_factory=dict)
    tuning: Tuning | None = None
    against: str | None = Field(default=None, description="row that differences are against; null: the first")
    printed: dict[str, dict[str, float | dict[str, float]]] = Field(
        default_factory=dict, description="values printed in the paper: row -> column -> value, or label -> value"
    )
    claims: Claims = Field(default_factory=Claims)
    figures: list[AnyDrawing] = Field(default_factory=list)
    keep: Literal["records", "models"] = Field(
        default="records", description="parts of a cell that stay after measurement; models: for ever"
    )

    @field_validator("seeds", mode="before")
    @classmethod
    def _counted(cls, value: Any) -> Any:
        return list(range(value)) if isinstance(value, int) and value > 0 else value

    @field_validator("columns", mode="before")
    @classmethod
    def _columns(cls, value: Any) -> Any:
        return {name: named_column(item) for name, item in value.items()} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has a seed twice")
        if self.claims.more_seeds and self.claims.to_judge and len(self.seeds) < FEWEST_SEEDS:
            raise ValueError(f"claims.more_seeds: {len(self.seeds)} seeds decide nothing; give seeds: {FEWEST_SEEDS}")
        for name, group in self.tuning.settings.items() if self.tuning else ():
            require_known(f"tuning.settings.{name}.rows", group.rows, self.rows)
        require_known("against", [self.against] if self.against is not None else [], self.rows)
        for name, row in self.rows.items():
            self._check_row(name, row)
        self._check_printed()
        for number, drawing in enumerate(self.figures):
            self._check_drawing(f"figures.{number}", drawing)
        for claim in self.claims.to_judge:
            self._check_claim(f"claims.{claim.kind}", claim)
            if self.axes and "" in claim.labels:
                raise ValueError(f"claims.{claim.kind}: '{claim.text}' names no point; add 'at LABEL', or 'at {ALL}'")
        for claim in self.claims.to_show:
            self._check_claim("claims.secondary", claim)
        return self

    def _check_drawing(self, where: str, drawing: AnyDrawing) -> None:
        drawing.require(where, self.columns, self.axes)
        if isinstance(drawing, RegimeMap):
            self._check_claim(f"{where}.map", drawing.claim)

    def _check_row(self, name: str, row: Row) -> None:
        if row.like is not None:
            require_known(f"rows.{name}.like", [row.like], list(self.rows)[: list(self.rows).index(name)])
        require_known(f"rows.{name}.columns", row.columns.keys() - {_ALL}, self.columns)
        self.columns_of(name)
        require_known(f"rows.{name}.only", row.only, self.axes)
        for axis, labels in row.only.items():
            require_known(f"rows.{name}.only.{axis}", map(setting_label, labels), self.axes[axis].overrides)
        if isinstance(row.tune, str) and self.tuning and self.tuning.table is None:
            raise ValueError(f"rows.{name}.tune: '{row.tune}' names a row of a main table; give tuning.table, or true")

    def _check_printed(self) -> None:
        require_known("printed", self.printed, self.rows)
        labels = [point_label(point) for point in self.points]
        for row, by_column in self.printed.items():
            require_known(f"printed.{row}", by_column, self.columns)
            for column, value in by_column.items():
                if isinstance(value, dict):
                    require_known(f"printed.{row}.{column}", value, labels)

    def _check_claim(self, key: str, claim: Claim) -> None:
        where = f"{key}: '{claim.text}'"
        for operand in claim.operands:
            require_known(where, [operand.row], self.rows)
            require_known(where, [operand.column], self.columns)
            if operand.label not in ("", ALL):
                require_known(where, [operand.label], map(point_label, self.points_of(operand.row)))
        if not self.shared_points(claim.operands):
            raise ValueError(f"{where}: its rows have no point in common")

    # ---- content

    @property
    def more_seeds(self) -> list[int]:
        """Seeds of the second look at the table, in addition."""
        first = max(self.seeds) + 1
        return list(range(first, first + self.claims.more_seeds))

    @property
    def all_seeds(self) -> list[int]:
        return [*self.seeds, *self.more_seeds]

    @property
    def looks(self) -> list[list[int]]:
        """Seeds of the first look at the table, and of the second one if there is one."""
        return [self.seeds, self.all_seeds] if self.more_seeds else [self.seeds]

    def effect(self, claim: Claim) -> float:
        """Smallest difference that matters to a claim."""
        return self.columns[claim.left[0].column].effect

    @property
    def base_name(self) -> str:
        """Name of the experiment that every row starts from."""
        return self.base if isinstance(self.base, str) else str(self.base.get("name", ""))

    @property
    def points(self) -> tuple[Point, ...]:
        """All combinations of labels; one empty point without axes."""
        return tuple(product(*(axis.overrides for axis in self.axes.values())))

    def points_of(self, row: str) -> tuple[Point, ...]:
        """Points at which a row is run."""
        allowed = {axis: set(map(setting_label, labels)) for axis, labels in self.resolved(row).only.items()}
        names = list(self.axes)
        return tuple(
            point
            for point in self.points
            if all(label in allowed.get(name, {label}) for name, label in zip(names, point, strict=True))
        )

    def shared_points(self, operands: Iterable[Operand]) -> list[Point]:
        """Points shared by the rows of a claim that name no point of their own."""
        free = [operand.row for operand in operands if operand.label in ("", ALL)]
        return [point for point in self.points if all(point in self.points_of(row) for row in free)]

    def resolved(self, name: str) -> Row:
        """A row with the settings that it inherits."""
        row = self.rows[name]
        return row if row.like is None else self.resolved(row.like).beneath(row)

    @property
    def coalitions(self) -> dict[frozenset[str], str]:
        """Coalition of client groups -> row, if the rows that differ in ``groups`` alone are all coalitions of two or
        more groups; else empty."""
        rows = {name: self.resolved(name) for name in self.rows}
        named = {name: row.groups for name, row in rows.items() if row.differs_in_groups_alone}
        if not (held := list(map(frozenset, filter(None, named.values())))):
            return {}
        players = frozenset.union(*held) - frozenset.intersection(*held)
        rows_by_group = {players if own is None else players & {*own}: name for name, own in reversed(named.items())}
        return rows_by_group if len(rows_by_group) == 2 ** len(players) >= 4 else {}

    def columns_of(self, row: str) -> dict[str, ColumnSettings]:
        """Columns of a row.

        Raises:
            ConfigError: The row's settings of a column are wrong.
        """
        given = self.resolved(row).columns
        changes = {name: given.get(name, given.get(_ALL, {})) for name in self.columns}
        return {
            name: column.changed(changes[name] or {}, f"rows.{row}.columns.{name}")
            for name, column in self.columns.items()
            if changes[name] is not None
        }

    def overrides_at(self, point: Point) -> Overrides:
        """Overrides of a point."""
        axes = zip(self.axes.values(), point, strict=True)
        return reduce(lambda known, item: known | item[0].overrides[item[1]], axes, Overrides())

    def printed_at(self, row: str, column: str, point: Point) -> float | None:
        """The printed value of the paper."""
        value = self.printed.get(row, {}).get(column)
        return value.get(point_label(point)) if isinstance(value, dict) else value

    # ---- files

    @classmethod
    def load(cls, source: str | Path, scale: str = SMALL) -> Study:
        """A study from its file, at a scale.

        Raises:
            ConfigError: The file or scale is unknown, or a setting is unknown, wrong or inconsistent.
        """
        content = study_content(source)
        scales = {SMALL: {}, **(content.pop("scales", None) or {})}
        if scale not in (*scales, SMOKE):
            raise ConfigError(f"--scale {scale}: {nearest(scale, {*scales, SMOKE})}")
        layers = [scales[SMALL], scales.get(SMOKE) or {}] if scale == SMOKE else [scales[scale] or {}]
        content = reduce(merged_study, layers, content)
        if scale != SMOKE and isinstance(content.get("tuning"), Mapping):
            content["tuning"] = {**content["tuning"], "scale": scale}
        study: Study = parse_settings(cls, content)
        return study.smaller((scales.get(SMOKE) or {}).get("set", {})) if scale == SMOKE else study

    def with_seeds(self, seeds: Iterable[int]) -> Study:
        """The study with exactly these seeds, without a second look."""
        content = self.content()
        return parse_settings(Study, content | {"seeds": list(seeds), "claims": {**content["claims"], "more_seeds": 0}})

    def content(self) -> dict[str, Any]:
        """The study as plain values; rows without inherited settings."""
        rows = {name: row.model_dump(mode="json", exclude_unset=True) for name, row in self.rows.items()}
        return {**self.model_dump(mode="json"), "rows": rows}

    def smaller(self, changes: Mapping[str, Any]) -> Study:
        """The study with one seed, one round, the first label of each axis and no tuning, as a quick check."""
        first = {name: next(iter(axis.overrides.items())) for name, axis in self.axes.items()}
        rows = {
            name: row.model_copy(update={"only": {}})
            for name, row in self.rows.items()
            if all(first[axis][0] in map(setting_label, labels) for axis, labels in row.only.items())
        }
        content = self.content() | {"printed": {}, "claims": {}, "figures": [], "tuning": None}
        content |= {"seeds": self.seeds[:1], "set": {**self.set, **_SMOKE_ROUNDS, **changes}}
        content |= {"axes": {name: {"points": {label: own}} for name, (label, own) in first.items()}}
        content |= {"rows": {name: row.model_dump(mode="json", exclude_unset=True) for name, row in rows.items()}}
        return parse_settings(Study, content | {"against": None})
