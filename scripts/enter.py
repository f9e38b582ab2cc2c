"""Enter a row of one's own into a board: tuned by the board's plan, compared with recorded rows, which do not run.

    python scripts/enter.py same --row mine --algorithm mymethod.Mine --data-dir DATA --weights-dir WEIGHTS
    python scripts/enter.py other --row mine --algorithm mymethod.Mine --set algorithm.length=2 --scale smoke

The module is imported from the working folder or PYTHONPATH. The row is one of a study that extends the board's, below
runs/boards; the clone's files and records stay as they are. A drawn cell of it is run again, from nothing. Printed are
the board with the row in its place, and the lines to add to the board's file; both and the entry as JSON lie in the
row's folder. A second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import boards
from confirm import confirm
from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.errors import ConfigError, PolyfedError, RunError, nearest
from polyfed.core.files import write_atomically
from polyfed.lab.studies.cells import Places, StudyPlan
from polyfed.lab.studies.runner import CELLS, run_study
from polyfed.lab.studies.study import SMALL, SMOKE, Study
from record_checks import by_seed, current, of_rows
from study_records import PAPERS, STUDIES, Again, StudyRecord, is_complete, read_record, record_path, record_text

BOARDS = {name.partition("board-")[2]: name for name in boards.BOARDS}
"""Short name of a board -> its study."""
LIKE = boards.OWN[1]
"""Row whose clients are those of every entered row."""
FOLDER = Path("runs") / "boards"


@dataclass(frozen=True)
class Entry:
    """A row of one's own.

    Attributes:
        board: Name of the board's study.
        row: Its name.
        algorithm: Import path of the method.
        settings: Overrides, as ``path=value``.
        out: Folder of its study, next to those of other rows.
        scale: small, or smoke for a trial.
        home: Folder of the records.
    """

    board: str
    row: str
    algorithm: str
    settings: Sequence[str]
    out: Path
    scale: str = SMALL
    home: Path = PAPERS

    @property
    def lines(self) -> dict[str, Any]:
        """The row, as the board's file would have it: with as many local epochs as its other rows, if it has them."""
        changes: dict[str, Any] = {}
        for text in self.settings:
            path, sign, value = text.partition("=")
            if not sign:
                raise ConfigError(f"--set {text}: give it as path=value, such as algorithm.local_epochs=3")
            changes[path] = yaml.safe_load(value)
        other: Any = Study.load(STUDIES[self.board]).resolved(LIKE).set.get("algorithm")
        name, epochs = "local_epochs", other.get("local_epochs") if isinstance(other, dict) else None
        is_given = {"algorithm.local_epochs", "algorithm.local_steps"} & {*changes}
        has_epochs = epochs and name in self._method().model_fields and not is_given
        algorithm = {"name": self.algorithm, **({name: epochs} if has_epochs else {})}
        return {self.row: {"like": LIKE, "set": {"algorithm": algorithm, **changes}}}

    def _method(self) -> type[Any]:
        try:
            return Algorithm.named(self.algorithm)
        except ValueError as error:
            raise ConfigError(f"--algorithm {self.algorithm}: {error}") from error

    def study(self) -> Study:
        """Write the study that extends the board's, and load it; nothing stays if a setting is wrong."""
        board = Study.load(STUDIES[self.board])
        if self.row in board.rows:
            raise ConfigError(f"--row {self.row}: the board has that row; name yours otherwise")
        claims = {"method": [f"{self.row} > {boards.ALONE} on {boards.COLUMN}"], "secondary": []}
        file = self.out.with_suffix(".yaml")
        content = {"extends": os.path.relpath(STUDIES[self.board], file.parent), "rows": self.lines, "claims": claims}
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())
        try:
            study = Study.load(file, self.scale)
            StudyPlan(study, Places(), Path()).check(self.row, study.points_of(self.row)[0])
        except ConfigError:
            file.unlink()
            raise
        return study

    def run(self, folders: Places, jobs: int) -> StudyRecord:
        """Run what the record lacks of the row and of both ends of the scale, and a drawn cell of the row again."""
        study, path, own = self.study(), self.home / self.path, self.out / self.path
        plan, recorded, again = StudyPlan(study, folders, self.out.parent / CELLS), None, dict[str, Again]()
        if self.scale == SMALL and path.is_file():
            before = current(read_record(self.board, self.scale, path), plan)
            recorded, again = before.results, dict(before.again)
        ends = [row for row in (boards.ALONE, boards.POOLED) if row in study.rows]
        choices = by_seed(recorded) if recorded else {}
        how: Any = {"jobs": jobs, "only": [self.row, *ends], "known": choices, "recorded": recorded}
        done = run_study(study, self.out, places=folders, **how)
        if done.ended.failures:
            raise RunError("; ".join(f"{label}: {why}" for label, why in done.ended.failures.items()))
        results = done.results
        earlier = read_record(self.board, self.scale, own) if own.is_file() else None
        for row, one in earlier.again.items() if earlier else ():
            if earlier and earlier.results.cells.get(one.cell) == results.cells.get(one.cell):
                again.setdefault(row, one)
        complete = [row for row in study.rows if is_complete(results, row)]
        record = of_rows(StudyRecord(self.board, self.scale, results, again), complete)
        own.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(own, record_text(record.results, again).encode())
        confirm(record, [row for row in (self.row, *ends) if row not in again], 0, folders, self.out)
        return read_record(self.board, self.scale, own)

    @property
    def path(self) -> str:
        """Path of the board's record, below any folder of records."""
        return record_path(self.board, self.scale)


def main(given: Sequence[str] | None = None, home: Path = PAPERS) -> int:
    """Enter a row, and print the board."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("board", help=f"{', '.join(BOARDS)}; or the study, such as {boards.SAME}")
    parser.add_argument("--row", required=True, help="name of the row")
    parser.add_argument("--algorithm", required=True, metavar="MODULE.CLASS", help="import path of the method")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="a setting of the row")
    parser.add_argument("--scale", choices=(SMALL, SMOKE), default=SMALL, help="smoke: a trial of all parts")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, one thread each")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("POLYFED_DATA") or None)
    parser.add_argument("--weights-dir", type=Path, default=os.environ.get("POLYFED_WEIGHTS") or None)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the studies of such rows")
    options = parser.parse_args(given)
    name = BOARDS.get(options.board, options.board)
    if name not in BOARDS.values():
        parser.error(f"no board '{options.board}'; {nearest(options.board, BOARDS)}")
    if not (stem := re.sub(r"\W+", "-", options.row).strip("-")):
        parser.error(f"--row '{options.row}': name it with letters or digits")
    sys.path.insert(0, str(Path.cwd()))
    folder = (options.out / f"{name.partition('board-')[2]}-{stem}").resolve()
    entry = Entry(name, options.row, options.algorithm, options.set, folder, options.scale, home)
    try:
        record = entry.run(Places(options.data_dir, options.weights_dir), options.jobs)
    except PolyfedError as error:
        parser.error(str(error))
    text = json.dumps(boards.entry(record, options.row), indent=1, ensure_ascii=False)
    lines = yaml.safe_dump({"rows": entry.lines}, sort_keys=False, allow_unicode=True)
    board = f"{record.heading}\n\n{boards.board_table(record)}\n"
    for file, content in {"entry.json": f"{text}\n", "rows.yaml": lines, "board.md": board}.items():
        write_atomically(folder / file, content.encode())
    print(f"{board}\nLines to add to papers/{name}.yaml:\n\n{lines}\nentry.json, rows.yaml and board.md: {folder}")
    if options.row in record.hidden:
        print(
            f"The cell that was run again had other figures, so that the row cannot enter: {record.again[options.row]}"
        )
    return int(options.row in record.hidden)


if __name__ == "__main__":
    sys.exit(main())
