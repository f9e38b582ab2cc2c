"""The leaderboards as JSON, made from the records of papers/polyfed/leaderboard-*.yaml."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from polyfed.lab.studies.study import Point
from study_records import StudyRecord

FILE = "polyfed/leaderboard.json"
RULES = "README.md#rules-of-entry"
_COSTS = {"traffic": "MiB", "seconds": "seconds"}
"""Kind of column -> what an entry calls it."""


def leaderboards_text(shown: Sequence[StudyRecord]) -> str:
    """All that are of today's studies and code."""
    boards = [_board(record) for record in shown if record.name.startswith("polyfed/leaderboard-")]
    return json.dumps({"rules": RULES, "boards": boards}, indent=1, ensure_ascii=False) + "\n"


def _board(record: StudyRecord) -> dict[str, Any]:
    column = main_column(record)
    return {
        "study": f"papers/{record.name}.yaml",
        "scale": record.scale,
        "title": record.study.title,
        "data": f"{record.study.base_name}: {record.study.description}",
        "code": list(record.results.code),
        "generation": list(record.results.generations),
        "column": column,
        "against": record.results.reference,
        "tuned": record.study.tuning.in_words if record.study.tuning else "nothing",
        "entries": [
            _entry(record, row, point, column) for point in record.study.points for row in sorted_rows(record, point)
        ],
    }


def main_column(record: StudyRecord) -> str:
    """That rows are in order by: the one of the first claim that is judged."""
    return record.main_columns[0]


def sorted_rows(record: StudyRecord, point: Point) -> list[str]:
    """Rows that have figures at a point, the best first."""
    column = main_column(record)
    sign = 1 if record.study.columns[column].lower else -1
    known = [row for row in record.study.rows if record.results.at(row, point, column)]
    return sorted(known, key=lambda row: sign * record.results.spread(row, point, column).mean)


def _entry(record: StudyRecord, row: str, point: Point, column: str) -> dict[str, Any]:
    results = record.results
    spread, chosen = results.spread(row, point, column), results.chosen.get((row, point))
    entry = {
        "row": row,
        "point": list(point),
        "by_seed": {str(seed): value for seed, value in results.at(row, point, column).items()},
        "mean": spread.mean,
        "chosen": dict(chosen.settings) if chosen else {},
    }
    sample = results.difference((row, point, column), (results.reference, point, column))
    if row != results.reference and sample is not None and len(sample.by_seed) > 1:
        entry["difference"] = {"mean": sample.mean, "interval": list(sample.interval)}
    for name, settings in record.study.columns.items():
        if settings.component_name() in _COSTS and results.at(row, point, name):
            entry[_COSTS[settings.component_name()]] = results.spread(row, point, name).mean
    return entry
