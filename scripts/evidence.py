"""The queue of evidence: run the cells that the records of papers/ lack, and write each complete row into its record.

    make evidence DATA=DATA WEIGHTS=WEIGHTS             # of HEAD, one cell at a time, at the lowest priority
    make evidence JOBS=16 COMMIT=abc123 HOURS=3         # of a commit, for three hours
    python scripts/evidence.py --only STUDY --rows "alone;pooled"    # rows of a study
    python scripts/evidence.py --plan                   # cells that are left, in CPU hours by study
    make records                                        # takes over its records, and makes the pages

Cells run from a clean clone of one commit, one thread each, in the order of insight per hour: the rows of the four main
claims, the boards and their maps, the rest of the main tables, then all other items. Cells and records lie below
runs/evidence, so that nothing in the checkout changes until ``make records``. A kill loses the cells that run; the same
command goes on. A row that is complete has a drawn cell run again, from nothing, before it decides.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from boards import BOARDS
from confirm import confirm
from polyfed.core.errors import ConfigError, DataError, RunError, nearest
from polyfed.core.files import write_atomically
from polyfed.lab.studies.cells import MODELS, Places, SearchIncompleteError, StudyPlan, cell_label
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import CELLS, OnProgress, Progress, run_study
from polyfed.lab.studies.study import SMALL, Point, Study
from polyfed.reporting.tables import duration
from record_checks import by_seed, current, of_rows
from study_records import PAPERS, STUDIES, StudyRecord, is_complete, read_record, record_path, record_text

ROOT, QUEUE = PAPERS.parent, Path("runs") / "evidence"
NOWHERE = Places()
MAIN = ("creamfl/t1", "fedafd/t1", "fedaid/t1", "fedcola/t1")
MAPS = ("polyfed/gap-", "polyfed/unpaired-")
"""Beginnings of the names of studies that take what a board chose: the boards with more and with fewer public items."""
FIRST = ("creamfl/t1", "fedaid/t1", "fedafd/t1", "fedcola/t4")
"""Studies whose judged rows come before all else: the papers' main claims; FedCola's is in Table 4's regime."""
SECONDS = {"creamfl": 18, "fedcola": 25, "fedafd": 30, "fedaid": 50, "polyfed/board": 25, "polyfed": 8}
"""CPU seconds of a cell, by the longest prefix of its study, once its features are encoded."""
EVERY = 300.0  # seconds between two lines of a study
CANDIDATES = 4
"""Candidates of a kind of settings that a row tries, on average."""


@dataclass(frozen=True)
class Task:
    """A study, or the rows of its judged claims alone.

    Attributes:
        name: Name of the study.
        judged: True for the rows of judged claims alone.
        some: These rows alone, in this order; all if empty.
        home: Folder of the records that the queue writes; those that it lacks are read from papers/.
    """

    name: str
    judged: bool = False
    home: Path = PAPERS
    some: tuple[str, ...] = ()

    @cached_property
    def study(self) -> Study:
        return Study.load(STUDIES[self.name])

    @property
    def rows(self) -> list[str]:
        if self.some:
            return [*self.some]
        judged = {operand.row for claim in self.study.claims.to_judge for operand in claim.operands}
        return [row for row in self.study.rows if row in judged or not self.judged]

    @property
    def path(self) -> Path:
        """The record that the queue writes."""
        return self.home / record_path(self.name, SMALL)

    @property
    def record(self) -> StudyRecord | None:
        there = [path for path in (self.path, PAPERS / record_path(self.name, SMALL)) if path.is_file()]
        return read_record(self.name, SMALL, there[0]) if there else None

    def plan(self, folders: Places, store: Path = Path()) -> StudyPlan:
        """The study's plan, with the choices of its main table's current rows, or its own."""
        table = self.study.tuning.table if self.study.tuning else None
        main = next((name for name in (*MAIN, *BOARDS) if table and STUDIES[name] == Path(table)), None)
        of = Task(main, home=self.home).known(folders) if main else None
        return StudyPlan(self.study, folders, store, by_seed(of.results) if of else {})

    def known(self, folders: Places) -> StudyRecord | None:
        """The rows of the record that need not run."""
        record = self.record
        return current(record, self.plan(folders)) if record else None

    def missing(self, folders: Places = NOWHERE) -> tuple[int, int]:
        """Cells of the first look that the record lacks, and runs that they take, tuning included."""
        plan, known = self.plan(folders), self.known(folders)
        have = known.results.cells if known else {}
        cells = runs = 0
        for row, point in plan.row_points(self.rows):
            left = len(labels_at(self.study, row, point) - have.keys())
            search = None if plan.main else plan.row_search(row, point, self.study.seeds[0])
            cells += left
            if search is None or point != self.study.points_of(row)[0]:
                runs += left
            else:  # a candidate that is chosen is the cell itself, unless candidates run otherwise or without models
                tuning, kinds = self.study.tuning, len(search.pattern.kinds)
                is_apart = self.study.keep == MODELS or bool(tuning and tuning.set)
                runs += left * (CANDIDATES * kinds - (kinds - 1) + is_apart)
        return cells, runs

    def run(self, out: Path, folders: Places, jobs: int, budget: float | None) -> None:
        """Run the missing cells, write complete rows into the record, and run a cell of each again."""
        plan, before = self.plan(folders, out.parent / CELLS), self.record
        known = self.known(folders)
        recorded, again = (known.results, known.again) if known else (None, {})
        if before:
            forget(plan, [row for row in self.rows if row in before.hidden])
        # rows of an earlier study stay until all that this task runs can take their place
        is_earlier = bool(before and known and {*before.results.code} - {*known.results.code} - {*before.hidden})

        def save(results: Results) -> None:
            rows = [row for row in results.study.rows if is_complete(results, row)]
            if rows and not (is_earlier and {*self.rows} - {*rows}):
                text = record_text(of_rows(StudyRecord("", SMALL, results), rows).results, again)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.path, text.encode())

        choices = plan.known if plan.main else (by_seed(recorded) if recorded else {})
        how: Any = {"only": self.rows, "jobs": jobs, "budget": budget, "on_results": save}
        how |= {"known": choices, "recorded": recorded, "listener": progress(self.name)}
        done = run_study(self.study, out, places=folders, **how)
        for label, why in done.ended.failures.items():
            log(f"{self.name}: {label}: {why}")
        if self.path.is_file() and not done.ended.stopped:
            record = read_record(self.name, SMALL, self.path)
            due = [row for row in self.rows if row in record.results.code and row not in record.again]
            confirm(record, due, 0, folders, self.home)


def labels_at(study: Study, row: str, point: Point) -> set[str]:
    """Labels of the cells of the first look at a point."""
    return {cell_label(row, point, seed) for seed in study.seeds}


def forget(plan: StudyPlan, rows: Sequence[str]) -> None:
    """Delete the cells of rows that a rerun has hidden, their candidates too, so that they run anew."""
    for row in rows:
        for point, seed in product(plan.study.points_of(row), plan.study.all_seeds):
            cells = plan.search(row, point, seed)
            with suppress(SearchIncompleteError, RunError):
                cells = [*cells, plan.cell(row, point, seed)]
            for cell in cells:
                shutil.rmtree(cell.folder(plan.store), ignore_errors=True)


def take(home: Path) -> list[str]:
    """Copy the records that the queue has written to papers/, where a rerun of the same cell stays; their names."""
    taken = []
    for name in STUDIES:
        path, own = home / record_path(name, SMALL), PAPERS / record_path(name, SMALL)
        if not path.is_file():
            continue
        new = read_record(name, SMALL, path)
        old = read_record(name, SMALL, own) if own.is_file() else new
        kept = {
            row: one
            for row, one in old.again.items()
            if [old.results.code.get(row), old.results.cells.get(one.cell)]
            == [new.results.code.get(row), new.results.cells.get(one.cell)]
        }
        text = record_text(new.results, {**kept, **new.again}).encode()
        if not own.is_file() or own.read_bytes() != text:
            own.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(own, text)
            taken.append(name)
    return taken


def tasks(home: Path = PAPERS) -> Iterator[Task]:
    """All studies in the order in which they run."""
    yield from (Task(name, True, home) for name in FIRST)
    maps = [name for name in STUDIES if name.startswith(MAPS)]
    others = [name for name in STUDIES if name not in (*MAIN, *BOARDS, *maps)]
    own = [name for name in others if name.startswith("polyfed/")]
    yield from (Task(name, home=home) for name in (*BOARDS, *maps, *MAIN))
    yield from (Task(name, home=home) for name in (*(one for one in others if one not in own), *own))


def seconds(name: str) -> float:
    """CPU seconds of a cell of a study."""
    return SECONDS[max((one for one in SECONDS if name.startswith(one)), key=len)]


@cache
def plan_table(home: Path = PAPERS) -> list[tuple[str, int, int, float]]:
    """Study -> cells of the first look that its record lacks, the runs that they take, and their CPU hours.

    An upper bound, as equal cells of several studies run once; second looks come on top.
    """
    lines = []
    for task in [Task(name, home=home) for name in dict.fromkeys(one.name for one in tasks(home))]:
        cells, runs = task.missing()
        lines.append((task.name, cells, runs, runs * seconds(task.name) / 3600))
    return lines


def clone_of(commit: str) -> Path:
    """A clean clone of a commit below runs/evidence."""
    git = ["git", "-C", str(ROOT)]
    sha = subprocess.run([*git, "rev-parse", "--short=8", f"{commit}^{{commit}}"], capture_output=True, text=True)
    if sha.returncode:
        raise SystemExit(f"evidence: COMMIT={commit}: no such commit; give one that git log shows")
    folder = ROOT / QUEUE / sha.stdout.strip()
    if not (folder / ".git").is_dir():
        subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", "--detach", sha.stdout.strip()], check=True)
    return folder


def main() -> int:
    """Run the queue, or print what it has left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print what is left")
    parser.add_argument("--take", action="store_true", help="copy the records that the queue has written to papers/")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, one thread each")
    parser.add_argument("--commit", default="HEAD", help="whose code and studies run")
    parser.add_argument("--hours", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--only", default="", help="these studies, separated by commas, in this order")
    parser.add_argument("--rows", default="", help="these rows of the studies of --only, separated by ';'")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("POLYFED_DATA") or None)
    parser.add_argument("--weights-dir", type=Path, default=os.environ.get("POLYFED_WEIGHTS") or None)
    parser.add_argument("--home", type=Path, help="folder of the records: given by the queue to itself")
    options = parser.parse_args()
    if unknown := [name for name in options.only.split(",") if name and name not in STUDIES]:
        parser.error(f"--only {unknown[0]}: {nearest(unknown[0], STUDIES)}")
    rows = [row for row in options.rows.split(";") if row]
    for name in options.only.split(",") if rows else ():
        if not name:
            parser.error("--rows: give their study as --only")
        known = Task(name).rows
        if strange := [row for row in rows if row not in known]:
            parser.error(f"--rows '{strange[0]}' of {name}: {nearest(strange[0], known)}")
    for folder in filter(None, (options.data_dir, options.weights_dir)):
        if not folder.is_dir():
            parser.error(
                f"'{folder}' is not a folder; give that of data sets as --data-dir, of weights as --weights-dir"
            )
    if options.plan:
        return print_plan()
    if options.take:
        print(*take(ROOT / QUEUE / "papers") or ["nothing new"], sep="\n")
        return 0
    if options.home is None:
        clone = clone_of(options.commit)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(clone / name) for name in ("src", "scripts", ".")),
            "OMP_NUM_THREADS": "1",
        }
        given = {"--data-dir": options.data_dir, "--weights-dir": options.weights_dir}
        folders = [word for name, path in given.items() if path for word in (name, str(path.resolve()))]
        command = [
            "nice",
            "-n",
            "19",
            sys.executable,
            str(clone / "scripts" / "evidence.py"),
            *sys.argv[1:],
            *folders,  # the last ones count, and hold from the clone as well
            "--home",
            str(ROOT / QUEUE / "papers"),
        ]
        os.chdir(clone)
        os.execvpe("nice", command, environment)
    return run_queue(options)


def run_queue(options: argparse.Namespace) -> int:
    """Run study after study until all is there or the hours are spent."""
    begun, out, failed = time.monotonic(), ROOT.parent / "studies", False
    folders = Places(options.data_dir, options.weights_dir)
    names = options.only.split(",") if options.only else ()
    some = tuple(row for row in options.rows.split(";") if row)
    for task in [Task(name, home=options.home, some=some) for name in names] or tasks(options.home):
        left = options.hours * 3600 - (time.monotonic() - begun)
        if left <= 0:
            break
        plan_table.cache_clear()
        hours = {name: own for name, _, _, own in plan_table(options.home)}
        left_hours = f"{hours[task.name]:.1f} of {sum(hours.values()):.1f} CPU h left"
        log(f"{task.name}{', judged rows' if task.judged else ''}: {left_hours}")
        try:
            folder = out / task.name.replace("/", "-")
            task.run(folder, folders, options.jobs, None if math.isinf(left) else left)
        except (ConfigError, DataError, RunError) as error:
            log(f"{task.name}: {error}")
        except Exception:  # the other studies go on
            traceback.print_exc()
            failed = True
    return int(failed)


def log(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def progress(name: str) -> OnProgress:
    """Print where a study is, every few minutes."""
    last = time.monotonic()

    def listen(where: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= EVERY:
            last = time.monotonic()
            left = "" if where.seconds_left is None else f", {duration(where.seconds_left)} for what is planned"
            log(f"{name}: {where.done} done, {where.failed} failed, {where.left} left{left}")

    return listen


def print_plan() -> int:
    """Print what is left, by study."""
    lines = plan_table()
    for name, cells, runs, hours in lines:
        if cells:
            print(f"{name:32} {cells:5} cells {runs:5} runs {hours:6.1f} CPU h")
    cells, runs, all_hours = (sum(column) for column in list(zip(*lines, strict=True))[1:])
    print(f"{'all':32} {cells:5} cells {runs:5} runs {all_hours:6.1f} CPU h")
    return 0


if __name__ == "__main__":
    sys.exit(main())
