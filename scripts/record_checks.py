"""Whether records are shown: a drawn cell of each row is run again with today's code (``scripts/confirm.py``).

Rows whose cell has the recorded figures are shown, as are those within 0.3 of their standard deviation over seeds, with
a mark; others are hidden and queued. A row of which no cell was run again is shown with a mark, and nothing is decided
by it. A record carries its own settings and choices: what its study's file says by now changes words and claims alone.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.cells import Places, StudyPlan
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.gauges import Gauge
from polyfed.lab.studies.study import Study
from study_records import PAPERS, RECORDS, STUDIES, StudyRecord, records

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
"""Exceptions in force, each with a reason; the list only shrinks."""
TIMED = ("seconds", "cpu_seconds", "cost_to")
"""Columns that no two runs have alike."""
_DISPLAY = ("lower", "digits", "effect")


@cache
def exceptions() -> Mapping[str, Mapping[str, str]]:
    """Kind -> what -> why."""
    return tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))


def column_key(column: ColumnSettings) -> str:
    """Identity of a figure: as ``ColumnSettings.digest``, but of settings alone; an analysis goes by its class,
    a gauge by its parts."""
    if isinstance(column, Gauge):
        return json.dumps([column_key(part) for part in column.parts])
    content = {name: value for name, value in column.model_dump(mode="json").items() if name not in _DISPLAY}
    if "analysis" in content:
        content["analysis"] = content["analysis"].rpartition(":")[2].lower()
    return json.dumps(content, sort_keys=True)


# ---- two figures for one cell

Known = dict[tuple[str, str], tuple[float, tuple[str, str, str]]]
"""Cell and key of a column -> figure, and where it stands: record, label of the cell, and column."""


def conflicts(recorded: Iterable[StudyRecord]) -> list[str]:
    """Cells that have other figures in one record than in another: a line for each two records and columns."""
    known: Known = {}
    return [line for record in recorded for line in _clashes(record, known)]


def _clashes(record: StudyRecord, known: Known) -> list[str]:
    """Cells of a record that have other figures where they are known; those that are not are known from then on."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for (row, point, name), by_seed in record.results.values.items():
        column = record.study.columns_of(row)[name]
        for seed, value in by_seed.items() if column.component_name() not in TIMED else ():
            label = ", ".join((row, *point, f"seed {seed}"))
            if cell := record.results.cells.get(label):
                place = record.label, label, name
                before, where = known.setdefault((cell, column_key(column)), (value, place))
                if not math.isclose(before, value, rel_tol=1e-9):
                    line = f"cell {cell}: {_told(where)} is {before:g}, {_told(place)} is {value:g}"
                    found.setdefault((where[0], where[2], name), []).append(line)
    return [lines[0] + (f", and {len(lines) - 1} more" if lines[1:] else "") for lines in found.values()]


def _told(place: tuple[str, str, str]) -> str:
    record, label, column = place
    return f"{record}.json, {label}, {column}"


# ---- shown


def standing(home: Path = PAPERS) -> list[StudyRecord]:
    """All records as they are shown, found once as long as none changes."""
    return _standing(home, tuple((path, path.stat().st_mtime_ns) for path in sorted(home.glob(f"*/{RECORDS}/*.json"))))


@cache
def _standing(home: Path, stamps: tuple[tuple[Path, int], ...]) -> list[StudyRecord]:
    shown = [without(as_today(record), record.hidden) for record in records(home)]
    return [record for record in shown if record.results.cells]


def faults(home: Path = PAPERS) -> list[str]:
    """What ``make pages`` ends with: cells with two figures."""
    return conflicts(standing(home))


def without(record: StudyRecord, rows: Iterable[str]) -> StudyRecord:
    """The record without some rows."""
    left, of = {*rows}, record.results
    results = replace(
        of,
        values={place: own for place, own in of.values.items() if place[0] not in left},
        chosen={place: own for place, own in of.chosen.items() if place[0] not in left},
        curves={place: own for place, own in of.curves.items() if place[0] not in left},
        cells={label: cell for label, cell in of.cells.items() if not record.is_of(label, left)},
        code={row: own for row, own in of.code.items() if row not in left},
    )
    return replace(record, results=results)


def as_today(record: StudyRecord) -> StudyRecord:
    """The record with today's words and claims, and the rows and columns that its study has by now."""
    now = Study.load(STUDIES[record.name], record.scale)
    of, places = record.results, {(row, point) for row in now.rows for point in now.points_of(row)}
    shared = {
        (row, name)
        for row in {*now.rows} & {*record.study.rows}
        for name, column in now.columns_of(row).items()
        if name in (then := record.study.columns_of(row)) and column_key(then[name]) == column_key(column)
    }
    labels = {", ".join((row, *point, f"seed {seed}")) for row, point in places for seed in now.all_seeds}
    results = replace(
        of,
        study=now,
        values={
            at: {seed: value for seed, value in own.items() if seed in now.all_seeds}
            for at, own in of.values.items()
            if at[:2] in places and (at[0], at[2]) in shared
        },
        chosen={at: own for at, own in of.chosen.items() if at[:2] in places},
        curves={at: own for at, own in of.curves.items() if at in places},
        cells={label: cell for label, cell in of.cells.items() if label in labels},
        code={row: own for row, own in of.code.items() if row in now.rows},
    )
    return replace(record, results=results)


# ---- what is missing


def current(record: StudyRecord, plan: StudyPlan) -> StudyRecord:
    """The cells of a record that today's study would run with the same settings, each tuned by its own seed."""
    then = StudyPlan(
        record.study, Places(), Path(), {k: v for k, v in record.results.chosen.items() if k[2] is not None}
    )  # type: ignore[misc]
    kept = {
        row
        for row, point in plan.row_points()
        if all(_is_same(record, then, plan, row, at) for at in plan.study.points_of(row))
    }
    return without(as_today(record), {*plan.study.rows} - kept)


def _is_same(record: StudyRecord, then: StudyPlan, now: StudyPlan, row: str, point: tuple[str, ...]) -> bool:
    seed, results = now.study.seeds[0], record.results
    if row not in then.study.rows or point not in then.study.points_of(row):
        return False
    chosen = results.choice(row, point, seed)
    if (row, point, None) in results.chosen or (chosen is None) != (now.row_search(row, point, seed) is None):
        return False
    factors = chosen.factors if chosen else {}
    try:
        return then.cell_with(row, point, seed, factors).settings == now.cell_with(row, point, seed, factors).settings
    except ConfigError:
        return False
