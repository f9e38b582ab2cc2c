"""Run recorded cells again, at today's code, and compare every figure with the record.

    python scripts/confirm.py fedcola/t1 --data-dir DATA --weights-dir WEIGHTS --write   # one cell of a record
    python scripts/confirm.py --cells 3 --draw 17                                        # three of all records

Cells are drawn at random, by ``--draw``, from those whose data are at hand; without a data folder that leaves studies
of generated data. With ``--write`` a record keeps what came out: where every figure is equal it becomes one of today's
generation, else it is stale. Another processor rounds otherwise, and
training carries that on: there ``--within`` says how far a figure may lie from the record, in standard deviations of
its row over seeds. Exit status 1: a figure is another.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from polyfed.core.errors import DataError
from polyfed.core.files import write_atomically
from polyfed.core.version import GENERATION
from polyfed.lab.studies.cells import Cell, CellFigures, Places, StudyPlan, require_data
from polyfed.lab.studies.workers import Order, execute
from record_checks import TIMED, as_today, reasons_of_study
from study_records import PAPERS, StudyRecord, record_path, record_text, records


@dataclass(frozen=True)
class Again:
    """Cells of a record that can be run again.

    Attributes:
        record: as it is.
        places: of data and weights.
    """

    record: StudyRecord
    places: Places

    @cached_property
    def today(self) -> StudyRecord:
        return as_today(self.record)

    @cached_property
    def plan(self) -> StudyPlan:
        return StudyPlan(self.today.study, self.places, Path())

    def cells(self) -> Iterator[Cell]:
        """All that the record has and the study still has."""
        for row, point in self.plan.row_points():
            chosen = self.today.results.chosen.get((row, point))
            yield from (
                cell for cell in self.plan.cells_with(row, point, chosen) if cell.label in self.record.results.cells
            )

    def at_hand(self) -> list[Cell]:
        """Those whose data are there."""
        return [cell for cell in self.cells() if _has_data(cell)]

    def differences(self, cell: Cell, store: Path, within: float) -> list[str]:
        """Figures that are others now: ``r1_sum: 9.06, now 9.1``."""
        study, results = self.today.study, self.today.results
        recorded = self.record.study.columns_of(cell.row)  # a column that came later has nothing to compare with
        columns = {
            name: own
            for name, own in study.columns_of(cell.row).items()
            if name in recorded and own.component_name() not in TIMED and (not own.once or cell.seed == study.seeds[0])
        }
        folder = cell.folder(store)
        execute(Order(cell.experiment, folder, list(columns.values()), self.places, "records", cell.sources))
        figures = CellFigures.of(folder)
        assert figures is not None
        told = []
        for name, column in columns.items():
            before, now = results.at(cell.row, cell.point, name).get(cell.seed), figures.values[column.digest]
            spread = results.spread(cell.row, cell.point, name).std
            if not _is_equal(before, now, within * spread if within else 0.0):
                told.append(f"{name}: {'nothing' if before is None else f'{before:g}'}, now {now}")
        return told

    def taken_over(self, again: dict[str, list[str]]) -> str:
        """The record with what came out."""
        known = {**self.record.again, **again}
        if any(known.values()):
            return record_text(self.record.results, known)
        settings = {", ".join((cell.row, *cell.point)): cell.settings_digest for cell in self.cells()}
        return record_text(replace(self.record.results, settings=settings, generations=[GENERATION]), known)


def drawn(ready: Sequence[Again], chance: random.Random, most: int, each: bool) -> list[tuple[Again, list[Cell]]]:
    """Records with cells: so many of each, or in all, of as many records as there are."""
    decks = [(again, chance.sample(cells, len(cells))) for again in ready if (cells := again.at_hand())]
    chance.shuffle(decks)
    counts = [most if each else most // len(decks) + (place < most % len(decks)) for place in range(len(decks))]
    return [(again, cells[:count]) for (again, cells), count in zip(decks, counts, strict=True) if count]


def _has_data(cell: Cell) -> bool:
    try:
        require_data(cell.experiment)
    except DataError:
        return False
    return True


def _is_equal(before: float | None, now: float | str, tolerance: float) -> bool:
    if before is None:
        return isinstance(now, str) or not math.isfinite(now)
    return isinstance(now, float | int) and math.isclose(before, now, rel_tol=1e-9, abs_tol=max(1e-9, tolerance))


def main(given: Sequence[str] | None = None) -> int:
    """Run some again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="records, such as fedcola/t1; none: all")
    parser.add_argument("--cells", type=int, default=1, help="how many, over all records that are named")
    parser.add_argument("--each", action="store_true", help="so many of each record")
    parser.add_argument("--draw", type=int, default=0, help="what they are drawn by")
    parser.add_argument("--within", type=float, default=0.0, help="standard deviations over seeds; 0: equal")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--weights-dir", type=Path)
    parser.add_argument(
        "--store", type=Path, help="folder of cells, to go on after an interruption; default: a new one"
    )
    parser.add_argument("--write", action="store_true", help="keep in the records what came out")
    options = parser.parse_args(given)
    if options.write and options.within:
        parser.error("--write --within: a record is confirmed by equal figures; leave one out")
    recorded = [record for record in records() if not options.names or record.name in options.names]
    if unknown := {*options.names} - {record.name for record in recorded}:
        parser.error(f"{min(unknown)}: no record of that name in papers/*/records")
    places = Places(options.data_dir, options.weights_dir)
    ready = [Again(record, places) for record in recorded if not reasons_of_study(record)]
    chosen = drawn(ready, random.Random(options.draw), options.cells, options.each)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for again, cells in chosen:
            told = {
                cell.label: again.differences(cell, options.store or Path(folder), options.within) for cell in cells
            }
            for label, differing in told.items():
                failed |= bool(differing)
                print(f"{again.record.name}: {label}: {'; '.join(differing) or 'equal'}", flush=True)
            if options.write:
                path = PAPERS / record_path(again.record.name, again.record.scale)
                write_atomically(path, again.taken_over(told).encode())
    if not chosen:
        print("no cell was run: the data of none are at hand; give --data-dir")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
