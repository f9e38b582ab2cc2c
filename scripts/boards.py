"""The boards: their tables, the README's headline, and JSON, made from the records of papers/polyfed/board-*.yaml."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from polyfed.core.untrusted import markdown
from polyfed.lab.studies.study import SMALL, Point
from polyfed.reporting.statistics import PairedSample
from study_records import StudyRecord, comparison_text

FILE = "polyfed/boards.json"
RULES = "README.md#rules-of-entry"
SAME, OTHER, MODALITIES = "polyfed/board-same", "polyfed/board-other", "polyfed/board-modalities"
ALONE, POOLED = "alone", "pooled"
REQUIRED: Mapping[str, Sequence[str]] = {SAME: (ALONE, POOLED, "fedavg"), OTHER: (ALONE, POOLED)}
"""Board -> rows that a headline requires: FedAvg where networks are equal."""
COLUMN = "R@1"
GALLERY = "1,000 images, 5,000 captions; chance 0.1"
_COSTS = {"traffic": "MiB", "cpu_seconds": "CPU s"}
"""Component of a column -> its key in an entry."""


def boards(recorded: Sequence[StudyRecord]) -> dict[str, StudyRecord]:
    """Name -> record of each board that has rows."""
    own = [record for record in recorded if record.scale == SMALL]
    return {record.name: record for record in own if record.name.startswith("polyfed/board-")}


def lacking(recorded: Sequence[StudyRecord]) -> list[str]:
    """Rows without which a headline is withheld: alone, pooled, FedAvg where networks are equal, other networks."""
    known = boards(recorded)
    return [
        f"{name.partition('/')[2]}: {row}"
        for name, rows in REQUIRED.items()
        for row in rows
        if name not in known or not has_row(known[name], row)
    ]


def headline(recorded: Sequence[StudyRecord]) -> str:
    """Tables of the boards with same and with other networks; of all boards so far if rows are lacking."""
    known = boards(recorded)
    shown = known if lacking(recorded) else REQUIRED
    return "\n\n".join(f"{_title(known[name])}\n\n{board_table(known[name])}" for name in shown)


def _title(record: StudyRecord) -> str:
    return f"**{record.study.title.partition(':')[0]}**: {' '.join(record.study.description.split())}"


def has_row(record: StudyRecord, row: str) -> bool:
    """True if a row has all seeds of the first look."""
    return {*record.study.seeds} <= {*record.results.at(row, (), COLUMN)}


def board_table(record: StudyRecord) -> str:
    """All rows that are complete, the best first: R@1, share of the gap, difference to alone, verdict, costs."""
    results = record.results
    heads = ["", f"mean R@1 in % ({GALLERY})", "share of the gap", "minus alone", "verdict", "MiB", "CPU s"]
    lines = [f"|{'|'.join(heads)}|", "|-|-:|-:|-:|-|-:|-:|"]
    for row in sorted_rows(record, ()):
        spread = results.spread(row, (), COLUMN)
        comparison, verdict = record.results.against(row, ALONE, (), COLUMN) if row != ALONE else (None, "")
        share = share_of_gap(record, row)
        cells = [
            markdown(f"{row}{record.mark(row)}"),
            f"{spread.mean:.1f} ± {spread.std:.1f}",
            "" if share is None else f"{100 * share:.0f} %",
            "" if comparison is None else comparison_text(comparison),
            verdict,
            *(_cost(record, row, name) for name in _COSTS.values()),
        ]
        lines.append(f"|{'|'.join(cells)}|")
    left = [row for row in record.study.rows if not has_row(record, row)]
    return "\n".join(lines) + (f"\n\nNot run yet: {markdown(', '.join(left))}." if left else "")


def share_of_gap(record: StudyRecord, row: str) -> float | None:
    """(row - alone) / (pooled - alone), of means over seeds; None if one is incomplete, or without a gap."""
    if not all(has_row(record, one) for one in (row, ALONE, POOLED)):
        return None
    own, alone, pooled = (record.results.spread(one, (), COLUMN).mean for one in (row, ALONE, POOLED))
    return (own - alone) / (pooled - alone) if pooled > alone else None


def gap_closed(record: StudyRecord, row: str) -> tuple[float, float] | None:
    """``share_of_gap`` over common seeds, and half of its 95 % interval over seeds, of the linearised ratio."""
    if not all(has_row(record, one) for one in (row, ALONE, POOLED)):
        return None
    own, alone, pooled = (record.results.at(one, (), COLUMN) for one in (row, ALONE, POOLED))
    seeds = [seed for seed in own if seed in alone and seed in pooled]
    gap = fmean(pooled[seed] - alone[seed] for seed in seeds)
    if gap <= 0:
        return None
    share = fmean(own[seed] - alone[seed] for seed in seeds) / gap
    off = PairedSample({seed: own[seed] - alone[seed] - share * (pooled[seed] - alone[seed]) for seed in seeds})
    return share, (off.interval[1] - off.mean) / gap


def _cost(record: StudyRecord, row: str, column: str) -> str:
    return f"{record.results.spread(row, (), column).mean:.1f}" if record.results.at(row, (), column) else ""


def boards_text(recorded: Sequence[StudyRecord]) -> str:
    """The boards as JSON."""
    content = [_board(record) for record in boards(recorded).values()]
    return json.dumps({"rules": RULES, "boards": content}, indent=1, ensure_ascii=False) + "\n"


def _board(record: StudyRecord) -> dict[str, Any]:
    return {
        "study": f"papers/{record.name}.yaml",
        "scale": record.scale,
        "title": record.study.title,
        "data": f"{record.study.base_name}: {record.study.description}",
        "code": {row: list(states) for row, states in record.results.code.items()},
        "column": f"mean R@1 in % ({GALLERY})",
        "against": ALONE,
        "tuned": record.study.tuning.in_words if record.study.tuning else "nothing",
        "entries": [_entry(record, row) for row in sorted_rows(record, ())],
    }


def sorted_rows(record: StudyRecord, point: Point) -> list[str]:
    """Rows that are complete, the best first."""
    known = [row for row in record.study.rows if has_row(record, row)]
    return sorted(known, key=lambda row: -record.results.spread(row, point, COLUMN).mean)


def _entry(record: StudyRecord, row: str) -> dict[str, Any]:
    results = record.results
    chosen = {seed: own.settings for (name, _, seed), own in results.chosen.items() if name == row}
    entry = {
        "row": row,
        "by_seed": {str(seed): value for seed, value in results.at(row, (), COLUMN).items()},
        "mean": results.spread(row, (), COLUMN).mean,
        "share_of_gap": share_of_gap(record, row),
        "chosen": {str(seed): dict(settings) for seed, settings in chosen.items()},
    }
    comparison, verdict = record.results.against(row, ALONE, (), COLUMN) if row != ALONE else (None, "")
    if comparison is not None:
        entry["difference"] = {
            "mean": comparison.estimate,
            "interval": list(comparison.interval),
            "p": comparison.p,
            "verdict": verdict,
        }
    for name, settings in record.study.columns.items():
        if settings.component_name() in _COSTS and results.at(row, (), name):
            entry[_COSTS[settings.component_name()]] = results.spread(row, (), name).mean
    return entry
