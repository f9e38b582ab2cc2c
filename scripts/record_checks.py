"""Whether records are of today's studies and of today's code, and whether they agree on cells that they share.

A record is **stale** if what was run is not what its study's file says by now, or if the code has had other figures
since (``core.version.GENERATION``). A record from before there were generations counts if a cell that was run again at
today's code (``scripts/confirm.py``) has its figures. A stale record is not shown, counted or cited.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.core.version import GENERATION
from polyfed.lab.studies.cells import Chosen, Places, StudyPlan
from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.columns.gauges import Gauge
from polyfed.lab.studies.study import Point, Study
from study_records import PAPERS, RECORDS, STUDIES, StudyRecord, records

EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
"""What is put up with for now, each with a reason: it only shrinks."""
TIMED = ("seconds", "cpu_seconds", "cost_to")
"""Columns that no two runs have alike."""
_DISPLAY = ("lower", "digits", "effect")


@cache
def exceptions() -> Mapping[str, Mapping[str, str]]:
    """Kind -> what -> why."""
    return tomllib.loads(EXCEPTIONS.read_text(encoding="utf-8"))


def column_key(column: ColumnSettings) -> str:
    """What a figure is of: as ``ColumnSettings.digest``, but of settings alone; an analysis goes by its class,
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
    """Cells of a record that have other figures where they are known; those that are not are known from then on.

    Cells are equal if they had one name when they were run, or have the same settings and seed by now.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for (row, point, name), by_seed in record.results.values.items():
        column = record.study.columns_of(row)[name]
        settings = record.results.settings.get(", ".join((row, *point)))
        for seed, value in by_seed.items() if column.component_name() not in TIMED else ():
            label = ", ".join((row, *point, f"seed {seed}"))
            for cell in filter(None, (record.results.cells.get(label), settings and f"{settings}, seed {seed}")):
                place = record.label, label, name
                before, where = known.setdefault((cell, column_key(column)), (value, place))
                if not math.isclose(before, value, rel_tol=1e-9):
                    line = f"cell {cell}: {_told(where)} is {before:g}, {_told(place)} is {value:g}"
                    found.setdefault((where[0], where[2], name), []).append(line)
    return [lines[0] + (f", and {len(lines) - 1} more" if lines[1:] else "") for lines in found.values()]


def _told(place: tuple[str, str, str]) -> str:
    record, label, column = place
    return f"{record}.json, {label}, {column}"


# ---- stale records


def reasons(record: StudyRecord) -> list[str]:
    """Why a record is stale; nothing of one that is of today's study and code."""
    withdrawn = exceptions()["stale"].get(record.label, "")
    return [
        *reasons_of_study(record),
        *_of_code(record),
        *([withdrawn] if withdrawn and not _is_certain(record) else []),
    ]


def _is_certain(record: StudyRecord) -> bool:
    """Whether its cells are known to be of today's code, whatever its study says by now."""
    return {*record.results.generations} == {GENERATION} and not any(record.again.values())


def is_unconfirmed(record: StudyRecord) -> bool:
    """Whether the generation of some cells is not known, and it is shown all the same, for now."""
    of_today = {*record.results.generations} <= {0, GENERATION} and not _is_certain(record)
    return of_today and not record.again and record.name in exceptions()["unconfirmed"]


def _of_code(record: StudyRecord) -> list[str]:
    differing = [f"{cell} has other figures by now ({'; '.join(was)})" for cell, was in record.again.items() if was]
    if differing or _is_certain(record) or is_unconfirmed(record):
        return differing[:1]
    if {*record.results.generations} <= {0, GENERATION}:
        return ["from before figures had generations, and no cell was run again"]
    return [f"figures of generations {list(record.results.generations)}; today's is {GENERATION}"]


def reasons_of_study(record: StudyRecord) -> list[str]:
    """What of the study has another content by now, as far as it changes what is run, measured or tuned."""
    then = record.study
    try:
        now = Study.load(STUDIES[record.name], record.scale)
        told = [f"seeds {then.seeds}, now {now.seeds}"] * (then.seeds != now.seeds)
        if record.results.chosen:
            told += ["tuned otherwise"] * (then.tuning != now.tuning)
        return [*told, *_of_columns(then, now), *_of_settings(record, now)]
    except (ConfigError, ValueError) as error:
        return [f"cannot be resolved: {error}"]


def _of_columns(then: Study, now: Study) -> Iterator[str]:
    for row in then.rows:
        if row in now.rows:
            before, by_now = then.columns_of(row), now.columns_of(row)
            for name in before.keys() & by_now.keys():
                if column_key(before[name]) != column_key(by_now[name]):
                    yield f"column {name} of {row} is another"


def _of_settings(record: StudyRecord, now: Study) -> Iterator[str]:
    shared = [place for place in _recorded(record) if place[0] in now.rows and place[1] in now.points_of(place[0])]
    if not shared:
        yield "none of its rows is there by now"
    if not record.results.settings and _runs(record.study) == _runs(now):
        return  # as they are written
    plans = [StudyPlan(study, Places(), Path()) for study in (record.study, now)]
    for row, point in shared:
        place, chosen = ", ".join((row, *point)), record.results.chosen.get((row, point))
        then, today = (partial(_settings_digest, plan, row, point, chosen) for plan in plans)
        if (record.results.settings.get(place) or then()) != today():
            yield f"{place}: other settings"


def _runs(study: Study) -> dict[str, Any]:
    content = study.model_dump(mode="json", include={"base", "set", "axes", "tuning"})
    return content | {row: study.resolved(row).model_dump(mode="json", exclude={"columns"}) for row in study.rows}


def _settings_digest(plan: StudyPlan, row: str, point: Point, chosen: Chosen | None) -> str:
    return plan.cells_with(row, point, chosen)[0].settings_digest


def _recorded(record: StudyRecord) -> list[tuple[str, Point]]:
    """Rows at their points of which there are cells."""
    rows = [(row, point) for row in record.study.rows for point in record.study.points_of(row)]
    first = record.study.seeds
    return [
        (row, point)
        for row, point in rows
        if any(", ".join((row, *point, f"seed {seed}")) in record.results.cells for seed in first)
    ]


# ---- what is shown

STALE = "run before its study or the code changed: not shown"


@dataclass(frozen=True)
class Standing:
    """What is shown of some records.

    Attributes:
        shown: those that are of today's study and code, each with today's study.
        stale: all others, as they are.
        why: label of a stale record -> reasons.
    """

    shown: list[StudyRecord]
    stale: list[StudyRecord]
    why: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, recorded: Iterable[StudyRecord]) -> Standing:
        """Where records have two figures for one cell, that counts which is known to be of today's code."""
        recorded = list(recorded)
        why = {record.label: reasons(record) for record in recorded}
        known: Known = {}
        for record in filter(_is_certain, recorded):
            _clashes(record, known)
        for record in recorded:
            if not why[record.label] and is_unconfirmed(record):
                why[record.label] = _clashes(record, {**known})
        shown = [as_today(record) for record in recorded if not why[record.label]]
        return cls(shown, [record for record in recorded if why[record.label]], why)


def standing(home: Path = PAPERS) -> Standing:
    """That of all records below papers/, found once as long as none changes."""
    return _standing(home, tuple((path, path.stat().st_mtime_ns) for path in sorted(home.glob(f"*/{RECORDS}/*.json"))))


@cache
def _standing(home: Path, stamps: tuple[tuple[Path, int], ...]) -> Standing:
    return Standing.of(records(home))


def faults(home: Path = PAPERS) -> list[str]:
    """What ``make pages`` ends with: cells with two figures, stale records, exceptions that are not needed."""
    now, known = standing(home), exceptions()
    told = conflicts(now.shown)
    told += [
        f"stale: {name}: {'; '.join(why[:3])}" for name, why in now.why.items() if why and name not in known["stale"]
    ]
    needed = {
        "stale": [one.label for one in now.stale],
        "unconfirmed": [one.name for one in now.shown if is_unconfirmed(one)],
    }
    for kind, names in needed.items():
        told += [f"{EXCEPTIONS.name}: {kind}: {name} is not: take it out" for name in known[kind] if name not in names]
    return told


def as_today(record: StudyRecord) -> StudyRecord:
    """The record with today's study: its words, its claims, and the rows and columns that it has by now."""
    now = Study.load(STUDIES[record.name], record.scale)
    of, places = record.results, {(row, point) for row in now.rows for point in now.points_of(row)}
    labels = {", ".join((row, *point, f"seed {seed}")) for row, point in places for seed in now.seeds}
    results = replace(
        of,
        study=now,
        values={at: own for at, own in of.values.items() if at[:2] in places and at[2] in now.columns},
        chosen={at: own for at, own in of.chosen.items() if at in places},
        curves={at: own for at, own in of.curves.items() if at in places},
        cells={label: cell for label, cell in of.cells.items() if label in labels},
    )
    return replace(record, results=results)
