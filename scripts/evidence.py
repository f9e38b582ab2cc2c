"""The queue of evidence: run what the records of papers/ lack, and write each complete row into its record.

    make evidence DATA=DATA WEIGHTS=WEIGHTS             # of HEAD, one cell at a time, at the lowest priority
    make evidence JOBS=16 COMMIT=abc123 HOURS=3         # of a commit, for three hours
    python scripts/evidence.py --plan                   # what is left, in CPU hours by study

Cells run from a clean clone of one commit below runs/evidence, one thread each, in the order of insight per hour: the
rows of the four main claims, the boards, the rest of the main tables, then all other items. A kill loses the cells that
run; the same command goes on. A row that is complete has a drawn cell run again, from nothing, before it decides.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from confirm import confirm
from polyfed.core.errors import ConfigError, DataError, RunError
from polyfed.core.files import write_atomically
from polyfed.lab.studies.cells import Chosen, Places, StudyPlan, cell_label
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import run_study
from polyfed.lab.studies.study import SMALL, Point, Study
from record_checks import current, without
from study_records import PAPERS, STUDIES, StudyRecord, read_record, record_path, record_text

ROOT = PAPERS.parent
MAIN = ("creamfl/t1", "fedafd/t1", "fedaid/t1", "fedcola/t1")
BOARDS = tuple(name for name in STUDIES if name.startswith("polyfed/board-"))
FIRST = ("creamfl/t1", "fedaid/t1", "fedafd/t1", "fedcola/t4")
"""Studies whose judged rows come before all else: the papers' main claims; FedCola's is in Table 4's regime."""
SECONDS = {"creamfl": 18, "fedcola": 25, "fedafd": 30, "fedaid": 50, "polyfed/board": 25, "polyfed": 8}
"""CPU seconds of a cell, by the longest prefix of its study, once its features are encoded."""
CANDIDATES = 4
"""Candidates of a kind of settings that a row tries, on average."""


@dataclass(frozen=True)
class Task:
    """A study, or the rows of its judged claims alone.

    Attributes:
        name: Name of the study.
        judged: True for the rows of judged claims alone.
        home: Folder of the records.
    """

    name: str
    judged: bool = False
    home: Path = PAPERS

    @cached_property
    def study(self) -> Study:
        return Study.load(STUDIES[self.name])

    @property
    def rows(self) -> list[str]:
        judged = {operand.row for claim in self.study.claims.to_judge for operand in claim.operands}
        return [row for row in self.study.rows if row in judged or not self.judged]

    @property
    def record(self) -> StudyRecord | None:
        path = self.home / record_path(self.name, SMALL)
        return read_record(self.name, SMALL, path) if path.is_file() else None

    def known(self, plan: StudyPlan) -> StudyRecord | None:
        """What of the record today's study would run alike."""
        record = self.record
        if record is None:
            return None
        kept = current(record, plan)
        return without(kept, record.hidden)

    def choices(self) -> Mapping[tuple[str, Point, int], Chosen]:
        """What the main table's record says that each seed chose."""
        tuning = self.study.tuning
        name = tuning and tuning.table and next((one for one in MAIN if STUDIES[one] == Path(tuning.table)), None)
        record = name and Task(name, home=self.home).record
        return {
            (row, at, k): own
            for (row, at, k), own in (record.results.chosen.items() if record else ())
            if k is not None
        }

    def missing(self, places: Places | None = None) -> tuple[int, int]:
        """Cells of the first look that the record lacks, and candidates that their tuning takes."""
        plan = StudyPlan(self.study, places or Places(), Path())
        known = self.known(plan)
        labels = known.results.cells if known else {}
        cells = candidates = 0
        for row, point in plan.row_points(self.rows):
            left = [seed for seed in self.study.seeds if cell_label(row, point, seed) not in labels]
            cells += len(left)
            search = plan.row_search(row, point, self.study.seeds[0])
            if search and not plan.main and point == self.study.points_of(row)[0]:
                candidates += len(left) * (CANDIDATES * len(search.pattern.kinds) - 1)
        return cells, candidates

    def run(self, out: Path, places: Places, jobs: int, budget: float | None) -> None:
        """Run what is missing, write complete rows into the record, and run a cell of each again."""
        plan, path = StudyPlan(self.study, places, Path()), self.home / record_path(self.name, SMALL)
        known = self.known(plan)
        recorded = known.results if known else None
        again = {row: one for row, one in known.again.items() if row in known.results.code} if known else {}

        def save(results: Results) -> None:
            rows = [row for row in results.study.rows if is_complete(results, row)]
            text = record_text(only(results, rows), again)
            if rows and text != (path.read_text(encoding="utf-8") if path.is_file() else ""):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text.encode())

        choices = {**self.choices(), **(by_seed(recorded) if recorded else {})}
        how: Any = {"only": self.rows, "jobs": jobs, "budget": budget, "on_results": save}
        done = run_study(self.study, out, places=places, known=choices, recorded=recorded, **how)
        for label, why in done.ended.failures.items():
            print(f"{self.name}: {label}: {why}", flush=True)
        record = self.record
        if record and not done.ended.stopped:
            due = [row for row in self.rows if row in record.results.code and row not in record.again]
            confirm(record, due, 0, places, self.home)


def by_seed(results: Results) -> dict[tuple[str, Point, int], Chosen]:
    """What each seed chose for itself."""
    return {(row, at, seed): own for (row, at, seed), own in results.chosen.items() if seed is not None}


def is_complete(results: Results, row: str) -> bool:
    """True if a row has all seeds of the first look at all of its points."""
    study = results.study
    return all(cell_label(row, point, seed) in results.cells for point in study.points_of(row) for seed in study.seeds)


def only(results: Results, rows: Sequence[str]) -> Results:
    """The figures of some rows."""
    left = [row for row in results.study.rows if row not in rows]
    return without(StudyRecord("", SMALL, results), left).results


def tasks(home: Path = PAPERS) -> Iterator[Task]:
    """All studies in the order in which they run."""
    yield from (Task(name, True, home) for name in FIRST)
    others = [name for name in STUDIES if name not in (*MAIN, *BOARDS)]
    own = [name for name in others if name.startswith("polyfed/")]
    yield from (Task(name, home=home) for name in (*BOARDS, *MAIN))
    yield from (Task(name, home=home) for name in (*(one for one in others if one not in own), *own))


def seconds(name: str) -> float:
    """CPU seconds of a cell of a study."""
    return SECONDS[max((one for one in SECONDS if name.startswith(one)), key=len)]


@cache
def plan_table(home: Path = PAPERS) -> list[tuple[str, int, int, float]]:
    """Study -> cells and candidates that its record lacks, and the CPU hours that they take."""
    lines = []
    for task in [Task(name, home=home) for name in dict.fromkeys(one.name for one in tasks(home))]:
        cells, candidates = task.missing()
        # a candidate that is chosen is the cell itself, unless candidates are run otherwise, or without their models
        is_apart = task.study.keep == "models" or (task.study.tuning and task.study.tuning.set)
        runs = cells + candidates if is_apart else max(cells, candidates)
        lines.append((task.name, cells, candidates, runs * seconds(task.name) / 3600))
    return lines


def clone_of(commit: str) -> Path:
    """A clean clone of a commit below runs/evidence."""
    git = ["git", "-C", str(ROOT)]
    sha = subprocess.run([*git, "rev-parse", "--short=8", f"{commit}^{{commit}}"], capture_output=True, text=True)
    if sha.returncode:
        raise SystemExit(f"evidence: COMMIT={commit}: no such commit; give one that git log shows")
    folder = ROOT / "runs" / "evidence" / sha.stdout.strip()
    if not (folder / ".git").is_dir():
        subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder)], check=True)
        subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", "--detach", sha.stdout.strip()], check=True)
    return folder


def main() -> int:
    """Run the queue, or print what it has left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print what is left")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, one thread each")
    parser.add_argument("--commit", default="HEAD", help="whose code and studies run")
    parser.add_argument("--hours", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--only", default="", help="these studies, separated by commas, in this order")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("POLYFED_DATA"))
    parser.add_argument("--weights-dir", type=Path, default=os.environ.get("POLYFED_WEIGHTS"))
    parser.add_argument("--home", type=Path, help="folder of the records: given by the queue to itself")
    options = parser.parse_args()
    if options.plan:
        return print_plan()
    if options.home is None:
        clone = clone_of(options.commit)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(clone / name) for name in ("src", "scripts")),
            "OMP_NUM_THREADS": "1",
            "POLYFED_DATA": str(Path(options.data_dir).resolve()) if options.data_dir else "",
            "POLYFED_WEIGHTS": str(Path(options.weights_dir).resolve()) if options.weights_dir else "",
        }
        command = [
            "nice",
            "-n",
            "19",
            sys.executable,
            str(clone / "scripts" / "evidence.py"),
            *sys.argv[1:],
            "--home",
            str(PAPERS),
        ]
        os.execvpe("nice", command, environment)
    return run_queue(options)


def run_queue(options: argparse.Namespace) -> int:
    """Run study after study until all is there or the hours are spent."""
    begun, out = time.monotonic(), ROOT.parent / "studies"
    places = Places(options.data_dir, options.weights_dir)
    queue = (
        [Task(name, home=options.home) for name in options.only.split(",")]
        if options.only
        else list(tasks(options.home))
    )
    for task in queue:
        left = options.hours * 3600 - (time.monotonic() - begun)
        if left <= 0:
            break
        print(f"{time.strftime('%H:%M:%S')} {task.name}{', judged rows' if task.judged else ''}", flush=True)
        try:
            folder = out / task.name.replace("/", "-")
            task.run(folder, places, options.jobs, None if math.isinf(left) else left)
        except (ConfigError, DataError, RunError) as error:
            print(f"{task.name}: {error}", flush=True)
    return 0


def print_plan() -> int:
    """Print what is left, by study."""
    lines = plan_table()
    for name, cells, candidates, hours in lines:
        if cells:
            print(f"{name:32} {cells:5} cells {candidates:5} candidates {hours:6.1f} CPU h")
    print(f"{'all':32} {sum(one[1] for one in lines):5} cells {'':16} {sum(one[3] for one in lines):6.1f} CPU h")
    return 0


if __name__ == "__main__":
    sys.exit(main())
