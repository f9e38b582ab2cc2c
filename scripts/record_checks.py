"""Selection of the records that are shown: a drawn cell of each row is run again with today's code (``confirm.py``).

Rows whose cell has the recorded figures are shown, as are those within 0.3 of their standard deviation over seeds, with
a mark; others are hidden and queued. A row of which no cell was run again is shown with a mark, and nothing is decided
by it. A record carries its own settings and choices; a later change of its study's file affects words and claims alone.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from polyfed.core.errors import ConfigError
from polyfed.lab.studies.cells import Chosen, Places, SearchIncompleteError, StudyPlan
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.metrics import Gauge
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import Point, Study
from study_records import PAPERS, RECORDS, STUDIES, StudyRecord, labels, records

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
    if "suite" in content:
        content["suite"] = Path(content["suite"]).stem
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
    clashes: dict[tuple[str, str, str], list[str]] = {}
    for (row, point, name), by_seed in record.results.values.items():
        column = record.study.columns_of(row)[name]
        for seed, value in by_seed.items() if column.component_name() not in TIMED else ():
            label = ", ".join((row, *point, f"seed {seed}"))
            if cell := record.results.cells.get(label):
                place = record.label, label, name
                before, where = known.setdefault((cell, column_key(column)), (value, place))
                if not math.isclose(before, value, rel_tol=1e-9):
                    line = f"cell {cell}: {_place_text(where)} is {before:g}, {_place_text(place)} is {value:g}"
                    clashes.setdefault((where[0], where[2], name), []).append(line)
    return [lines[0] + (f", and {len(lines) - 1} more" if lines[1:] else "") for lines in clashes.values()]


def _place_text(place: tuple[str, str, str]) -> str:
    record, label, column = place
    return f"{record}.json, {label}, {column}"


# ---- shown


def standing(home: Path = PAPERS) -> list[StudyRecord]:
    """All records as they are shown, found once as long as none changes."""
    return _standing(home, tuple((path, path.stat().st_mtime_ns) for path in sorted(home.glob(f"*/{RECORDS}/*.json"))))


@cache
def _standing(home: Path, stamps: tuple[tuple[Path, int], ...]) -> list[StudyRecord]:
    shown = [of_rows(today := as_today(record), {*today.study.rows} - {*record.hidden}) for record in records(home)]
    return [record for record in shown if record.results.cells]


def faults(home: Path = PAPERS) -> list[str]:
    """Cells with two figures, with which ``make pages`` ends."""
    return conflicts(standing(home))


def of_rows(record: StudyRecord, rows: Iterable[str]) -> StudyRecord:
    """The record with some rows alone."""
    kept = {*rows} & {*record.study.rows}
    again = {row: one for row, one in record.again.items() if row in kept}
    return replace(record, results=_subset(record.results, record.study, kept), again=again)


def as_today(record: StudyRecord) -> StudyRecord:
    """The record with today's words and claims, and the rows and columns that its study still has."""
    now = Study.load(STUDIES[record.name], record.scale)
    shared = {
        (row, name)
        for row in {*now.rows} & {*record.study.rows}
        for name, column in now.columns_of(row).items()
        if name in (then := record.study.columns_of(row)) and column_key(then[name]) == column_key(column)
    }
    results = _subset(record.results, now, {*now.rows})
    values = {
        (row, point, name): {seed: value for seed, value in by_seed.items() if seed in now.all_seeds}
        for (row, point, name), by_seed in results.values.items()
        if (row, name) in shared
    }
    return replace(record, results=replace(results, values=values))


def _subset(results: Results, study: Study, rows: Collection[str]) -> Results:
    """Results of some rows of a study."""
    points = {(row, point) for row in rows for point in study.points_of(row)}
    known = labels(study, rows, study.all_seeds)
    by_row = {
        name: {row: own for row, own in getattr(results, name).items() if row in rows}
        for name in ("code", "replies", "withheld")
    }
    return replace(
        results,
        study=study,
        values={at: own for at, own in results.values.items() if at[:2] in points},
        chosen={at: own for at, own in results.chosen.items() if at[:2] in points},
        curves={at: own for at, own in results.curves.items() if at in points},
        cells={label: cell for label, cell in results.cells.items() if label in known},
        **by_row,
    )


# ---- what is missing


def current(record: StudyRecord, plan: StudyPlan) -> StudyRecord:
    """The rows of a record that today's study runs with the same settings and columns, each tuned by its own seed.

    Rows that are hidden are not among them. ``plan`` knows the main table's choices, where the study takes them.
    """
    then, hidden = StudyPlan(record.study, Places(), Path(), by_seed(record.results)), {*record.hidden}
    kept = [row for row in plan.study.rows if row not in hidden and _is_current(record, then, plan, row)]
    return of_rows(as_today(record), kept)


def by_seed(results: Results) -> dict[tuple[str, Point, int], Chosen]:
    """Choices that each seed made for itself."""
    return {(row, at, seed): own for (row, at, seed), own in results.chosen.items() if seed is not None}


def _is_current(record: StudyRecord, then: StudyPlan, now: StudyPlan, row: str) -> bool:
    if row not in then.study.rows or not {*now.study.points_of(row)} <= {*then.study.points_of(row)}:
        return False
    measured, asked = ({*map(column_key, study.columns_of(row).values())} for study in (then.study, now.study))
    points = [(row, point, seed) for point in now.study.points_of(row) for seed in now.study.seeds]
    return asked <= measured and all(_is_same(record.results, then, now, *place) for place in points)


def _is_same(results: Results, then: StudyPlan, now: StudyPlan, row: str, point: Point, seed: int) -> bool:
    chosen, is_searched = results.chosen.get((row, point, seed)), now.row_search(row, point, seed) is not None
    if is_searched == (chosen is None) or (row, point, None) in results.chosen:
        return False
    try:
        asked = now.chosen(row, point, seed) if now.main else chosen
        factors = [one.factors if one else {} for one in (chosen, asked)]
        cells = [plan.cell_with(row, point, seed, own) for plan, own in zip((then, now), factors, strict=True)]
    except (ConfigError, SearchIncompleteError):
        return False
    return cells[0].settings == cells[1].settings
