"""Run a drawn cell of each row of a record again, with today's code, and keep the outcome in the record.

    python scripts/confirm.py fedcola/t1 --data-dir DATA --weights-dir WEIGHTS   # one cell per row
    python scripts/confirm.py --draw 17                                          # of all records whose data are at hand

Equal figures: the row is shown; within 0.3 of their standard deviation over seeds: shown with a mark, as another
processor rounds otherwise; else the row is hidden, and the queue of evidence runs it anew. Exit status 1: a row is
hidden by the rerun.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from polyfed.core.errors import DataError
from polyfed.core.files import write_atomically
from polyfed.lab.studies.cells import Cell, CellFigures, Places, StudyPlan, require_data
from polyfed.lab.studies.workers import Order, execute
from record_checks import TIMED, as_today, column_key
from study_records import PAPERS, Again, StudyRecord, record_path, record_text, records


def drawn_cell(record: StudyRecord, row: str, chance: random.Random, folders: Places) -> Cell | None:
    """A random cell of a row, by the record's own study and choices; None if its data are missing."""
    study, results = record.study, record.results
    plan, known = StudyPlan(study, folders, Path()), []
    for point in study.points_of(row):
        known += [
            (point, seed) for seed in study.all_seeds if ", ".join((row, *point, f"seed {seed}")) in results.cells
        ]
    if not known:
        return None
    point, seed = chance.choice(known)
    chosen = results.choice(row, point, seed)
    cell = plan.cell_with(row, point, seed, chosen.factors if chosen else {})
    try:
        require_data(cell.experiment)
    except DataError:
        return None
    return cell


def run_again(record: StudyRecord, cell: Cell, folders: Places, store: Path) -> Again:
    """Run a recorded cell, and compare every figure that two runs can have alike."""
    results, seed = record.results, record.study.seeds[0]
    # analyses and suites that have moved stand in today's study under their new names
    today = as_today(record).study
    of_row = today.columns_of(cell.row).values() if cell.row in today.rows else ()
    moved = {column_key(own): own for own in of_row}
    columns = {
        name: moved.get(column_key(own), own)
        for name, own in record.study.columns_of(cell.row).items()
        if own.component_name() not in TIMED and (not own.once or cell.seed == seed)
    }
    folder = cell.folder(store)
    folder.parent.mkdir(parents=True, exist_ok=True)
    execute(Order(cell.experiment, folder, list(columns.values()), folders, "records", cell.sources))
    figures = CellFigures.of(folder)
    assert figures is not None
    distance, differing = 0.0, dict[str, list[float | str | None]]()
    for name, column in columns.items():
        before, now = results.at(cell.row, cell.point, name).get(cell.seed), figures.values[column.digest]
        if before is None and (isinstance(now, str) or not math.isfinite(now)):
            continue
        spread = results.spread(cell.row, cell.point, name).std
        off = _distance(before, now, spread)
        if off:
            distance, differing[name] = max(distance, off), [before, now]
    return Again(cell.label, figures.code, distance, differing)


def _distance(before: float | None, now: float | str, spread: float) -> float:
    """In standard deviations over seeds; 1,000 where a figure is gone or new, or differs where seeds do not."""
    if before is None or isinstance(now, str):
        return 1000.0
    if math.isclose(before, now, rel_tol=1e-9, abs_tol=1e-9):
        return 0.0
    return abs(now - before) / spread if spread > 0 else 1000.0


def confirm(record: StudyRecord, rows: Sequence[str], draw: int, folders: Places, home: Path = PAPERS) -> list[str]:
    """Run a cell of each of these rows again, and write the outcome into the record; returns the hidden rows."""
    path, again = home / record_path(record.name, record.scale), dict(record.again)
    with tempfile.TemporaryDirectory() as store:
        for row in rows:
            cell = drawn_cell(record, row, random.Random(f"{draw} {record.label} {row}"), folders)
            if cell is None:
                continue
            again[row] = run_again(record, cell, folders, Path(store))
            differences = "; ".join(f"{name}: {was}, now {now}" for name, (was, now) in again[row].figures.items())
            print(f"{record.label}: {cell.label}: {differences or 'equal'}", flush=True)
            write_atomically(path, record_text(record.results, again).encode())
    return replace(record, again=again).hidden


def main(given: Sequence[str] | None = None) -> int:
    """Run cells again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="records, such as fedcola/t1; none: all")
    parser.add_argument("--rows", default="", help="these rows, separated by semicolons; none: all")
    parser.add_argument("--draw", type=int, default=0, help="seed of the draw of cells")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--weights-dir", type=Path)
    options = parser.parse_args(given)
    recorded = [record for record in records() if not options.names or record.name in options.names]
    if unknown := {*options.names} - {record.name for record in recorded}:
        parser.error(f"{min(unknown)}: no record of that name in papers/*/records")
    folders, hidden = Places(options.data_dir, options.weights_dir), list[str]()
    for record in recorded:
        rows = (
            options.rows.split(";")
            if options.rows
            else [row for row in record.study.rows if row in record.results.code]
        )
        hidden += confirm(record, rows, options.draw, folders)
    return 1 if hidden else 0


if __name__ == "__main__":
    sys.exit(main())
