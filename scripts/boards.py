"""The boards: their tables, the README's headline, and JSON, made from the records of papers/polyfed/board-*.yaml."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from polyfed.core.untrusted import markdown
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.study import SMALL, Point, Study
from polyfed.reporting.statistics import PairedSample
from study_records import CLOSE, STUDIES, StudyRecord, comparison_text, labels, table

FILE = "polyfed/boards.json"
PAGE = "README.md#rules-of-entry"
ENTER = "python scripts/enter.py STUDY --row NAME --algorithm MODULE.CLASS"
RULES = (
    "The row is of the study's file: the same federation, public set, rounds, columns and seeds as all others.",
    "It is tuned by the file's tuning: each seed by itself, on its own validation data.",
    "It has all seeds of the file, and those of the second look if its difference to the row alone is undecided.",
    f"A drawn cell of it, run again, has its figures; within {CLOSE} standard deviations over seeds it is marked.",
)
"""Rules of entry, as the page of the boards and their JSON have them."""
SAME, OTHER, MODALITIES = "polyfed/board-same", "polyfed/board-other", "polyfed/board-modalities"
ALONE, POOLED = "alone", "pooled"
REQUIRED: Mapping[str, Sequence[str]] = {SAME: (ALONE, POOLED, "fedavg"), OTHER: (ALONE, POOLED)}
"""Board -> rows that a headline requires: FedAvg where networks are equal."""
COLUMN = "R@1"
GALLERY = "1,000 images, 5,000 captions; chance 0.1"
COSTS = {"MiB": ("MiB",), "CPU s": ("CPU s",), "MFLOPs a round": ("MFLOPs clients", "MFLOPs server")}
"""Cost of a row -> the columns of the boards that add up to it."""


BOARDS = (SAME, OTHER, MODALITIES)
OWN = ("change distillation, unpaired", "change distillation")
AVERAGED = ("fedavg, holding public pairs", "fedavg")
_CONTROLS = ("no private data", "no private data, unpaired", "change distillation of pairs", "fedavg of pairs")
"""Rows that show what a method does without a part; no method competes in them."""


def boards(recorded: Sequence[StudyRecord]) -> dict[str, StudyRecord]:
    """Name -> record of each board that has rows."""
    own = [record for record in recorded if record.scale == SMALL]
    return {record.name: record for record in own if record.name.startswith("polyfed/board-")}


def all_boards(recorded: Sequence[StudyRecord]) -> dict[str, StudyRecord]:
    """Name -> record of every board, without figures where nothing was run."""
    known = boards(recorded)
    return {
        name: known.get(name) or StudyRecord(name, SMALL, Results(Study.load(STUDIES[name]), {})) for name in BOARDS
    }


_NAMED = 6  # rows that a sentence names


def short_table(recorded: Sequence[StudyRecord]) -> str:
    """Share of the gap with costs, a column a board: its ends, FedAvg, change distillation, CreamFL, the best other."""
    known = all_boards(recorded)
    named = (POOLED, ALONE, *AVERAGED, *OWN, "creamfl")
    best = [next((row for row in sorted_rows(one) if row not in (*named, *_CONTROLS)), "") for one in known.values()]
    rows = [row for row in dict.fromkeys((*named, *best)) if any(has_row(one, row) for one in known.values())]
    order = {row: [-_share(one, row) for one in known.values()] for row in rows}
    lines = [["share of the gap in % (MiB, CPU s)", *map(board_name, known.values())]]
    lines += [[row, *(_short(one, row) for one in known.values())] for row in sorted(rows, key=order.__getitem__)]
    left = {board_name(one): (not_run(one), len(one.study.rows)) for one in known.values()}
    texts = [
        f" {title[0].upper()}{title[1:]}: {'; '.join(own) if len(own) <= _NAMED else f'{len(own)} of {count} rows'}."
        for title, (own, count) in left.items()
        if own
    ]
    notes = [f"Not run yet.{markdown(''.join(texts))}"] if texts else []
    notes += ["°: no cell of it was run again so far."] if any("°" in cell for line in lines for cell in line) else []
    return "\n\n".join([table(*lines), *notes])


def board_name(record: StudyRecord) -> str:
    """``same networks``."""
    return record.study.title.partition(":")[0].removeprefix("Board of ")


def _share(record: StudyRecord, row: str) -> float:
    share = share_of_gap(record, row)
    return -math.inf if share is None else share


def _short(record: StudyRecord, row: str) -> str:
    """``99 (54.2, 11.3)``; a dash where the row is none of the board."""
    if row not in record.study.rows:
        return "-"
    if not has_row(record, row):
        return "not run yet"
    share = share_of_gap(record, row)
    costs = ", ".join(filter(None, (_cost(record, row, name) for name in ("MiB", "CPU s"))))
    return f"{'?' if share is None else f'{100 * share:.0f}'}{record.mark(row)}{costs and f' ({costs})'}"


def not_run(record: StudyRecord) -> list[str]:
    """Rows that compete and lack a seed of the first look."""
    return [row for row in record.study.rows if COLUMN in record.study.columns_of(row) and not has_row(record, row)]


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


def has_row(record: StudyRecord, row: str, point: Point = ()) -> bool:
    """True if a row has all seeds of the first look."""
    return {*record.study.seeds} <= {*record.results.at(row, point, COLUMN)}


def board_table(record: StudyRecord) -> str:
    """All rows that are complete, the best first: R@1, share of the gap, difference to alone, verdict, costs."""
    results = record.results
    heads = ["", f"mean R@1 in % ({GALLERY})", "share of the gap", "minus alone", "verdict", *COSTS]
    lines = [f"|{'|'.join(heads)}|", "|-|-:|-:|-:|-|-:|-:|-:|"]
    for row in sorted_rows(record):
        spread = results.spread(row, (), COLUMN)
        comparison, verdict = record.results.against(row, ALONE, (), COLUMN) if row != ALONE else (None, "")
        shared = gap_closed(record, row)
        cells = [
            markdown(f"{row}{record.mark(row)}"),
            _plus_minus(spread.mean, spread.std, 1),
            "" if shared is None else f"{_plus_minus(100 * shared[0], 100 * shared[1], 0)} %",
            "" if comparison is None else comparison_text(comparison),
            verdict,
            *(_cost(record, row, name) for name in COSTS),
        ]
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(
        [*lines, *(["", left] if (left := left_text(record)) else [])] if lines[2:] else [left_text(record)]
    )


def _plus_minus(mean: float, reach: float, digits: int) -> str:
    return f"{mean:.{digits}f}" + (f" ± {reach:.{digits}f}" if math.isfinite(reach) else "")


def left_text(record: StudyRecord) -> str:
    """Rows that were not run, by reason."""
    rows: dict[str, list[str]] = {}
    for row in not_run(record):
        rows.setdefault(queued(record, row), []).append(row)
    texts = [f"{reason}: {markdown('; '.join(own))}" for reason, own in rows.items()]
    return f"Not measured yet, {'. '.join(texts)}." if texts else ""


def share_of_gap(record: StudyRecord, row: str, point: Point = ()) -> float | None:
    """(row - alone) / (pooled - alone), of means over their common seeds; None if one is incomplete or without gap."""
    return shared[0] if (shared := gap_closed(record, row, point)) else None


def gap_closed(record: StudyRecord, row: str, point: Point = ()) -> tuple[float, float] | None:
    """``share_of_gap``, and half of its 95 % interval over seeds, of the linearised ratio."""
    if not all(has_row(record, one, point) for one in (row, ALONE, POOLED)):
        return None
    own, alone, pooled = (record.results.at(one, point, COLUMN) for one in (row, ALONE, POOLED))
    seeds = [seed for seed in own if seed in alone and seed in pooled]
    gap = fmean(pooled[seed] - alone[seed] for seed in seeds)
    if gap <= 0:
        return None
    share = fmean(own[seed] - alone[seed] for seed in seeds) / gap
    off = PairedSample({seed: own[seed] - alone[seed] - share * (pooled[seed] - alone[seed]) for seed in seeds})
    return share, (off.interval[1] - off.mean) / gap


def cost_of(record: StudyRecord, row: str, cost: str, point: Point = ()) -> float | None:
    """Mean of a cost over seeds."""
    spreads = [record.results.spread(row, point, name).mean for name in COSTS[cost]]
    return sum(spreads) if all(map(math.isfinite, spreads)) else None


def _cost(record: StudyRecord, row: str, cost: str) -> str:
    figure = cost_of(record, row, cost)
    return "" if figure is None else f"{figure:,.0f}" if figure >= 1000 else f"{figure:.1f}"


def boards_text(recorded: Sequence[StudyRecord]) -> str:
    """The boards as JSON."""
    content = [_board(record) for record in all_boards(recorded).values()]
    rules = {"page": PAGE, "enter": ENTER, "in_words": RULES}
    return json.dumps({"rules": rules, "boards": content}, indent=1, ensure_ascii=False) + "\n"


def _board(record: StudyRecord) -> dict[str, Any]:
    study, content = record.study, record.study.content()
    return {
        "study": f"papers/{record.name}.yaml",
        "scale": record.scale,
        "title": study.title,
        "data": f"{study.base_name}: {study.description}",
        "seeds": study.seeds,
        "more_seeds": study.more_seeds,
        "tuned": study.tuning.in_words if study.tuning else "nothing",
        "tuning": content["tuning"],
        "columns": content["columns"],
        "confirm": {"cells": 1, "standard_deviations": CLOSE},
        "code": {row: list(states) for row, states in record.results.code.items()},
        "column": f"mean R@1 in % ({GALLERY})",
        "against": ALONE,
        "scale_of_share": {ALONE: 0, POOLED: 1},
        "entries": [entry(record, row) for row in sorted_rows(record)],
        "not_run": {row: queued(record, row) for row in not_run(record)},
    }


def queued(record: StudyRecord, row: str) -> str:
    """Reason why a row has no figure."""
    cells = labels(record.study, [row], record.study.seeds) - record.results.cells.keys()
    return f"queued with {len(cells)} cells and their searches" if record.scale == SMALL else "at this scale"


def sorted_rows(record: StudyRecord) -> list[str]:
    """Rows that are complete, the best first."""
    known = [row for row in record.study.rows if has_row(record, row)]
    return sorted(known, key=lambda row: -record.results.spread(row, (), COLUMN).mean)


def entry(record: StudyRecord, row: str) -> dict[str, Any]:
    results = record.results
    chosen = {seed: own.settings for (name, _, seed), own in results.chosen.items() if name == row}
    shared = gap_closed(record, row)
    content = {
        "row": row,
        "by_seed": {str(seed): value for seed, value in results.at(row, (), COLUMN).items()},
        "mean": results.spread(row, (), COLUMN).mean,
        "share_of_gap": shared and shared[0],
        "share_half_interval": shared and (shared[1] if math.isfinite(shared[1]) else None),
        "chosen": {str(seed): dict(settings) for seed, settings in chosen.items()},
    }
    comparison, verdict = record.results.against(row, ALONE, (), COLUMN) if row != ALONE else (None, "")
    if comparison is not None:
        content["difference"] = {
            "mean": comparison.estimate,
            "interval": [end if math.isfinite(end) else None for end in comparison.interval],
            "p": comparison.p if math.isfinite(comparison.p) else None,
            "verdict": verdict,
        }
    content |= {name: figure for name in COSTS if (figure := cost_of(record, row, name)) is not None}
    return content
