"""Studies that run: shared cells, failures that end nothing else, what stays, and kills."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from lab.studies.conftest import tiny_study
from polyfed.core.errors import ConfigError, RunError
from polyfed.lab.studies.cells import Places, StudyPlan
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import StudyRun, run_study
from polyfed.lab.studies.study import Study
from polyfed.runs.opened import open_run

Load = Callable[..., Study]
OWN = "lab.studies.study_columns"
BROKEN = {"set": {"data.sources.scenes.train": 12, "public.items": None}}
"""All items are public, so that nothing is left for the clients: refused when the data are dealt."""


def run(study: Study, out: Path, **options: Any) -> StudyRun:
    return run_study(study, out, jobs=2, **options)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_cells_give_the_figures_of_their_runs_and_are_not_run_twice(loaded: Load, tmp_path: Path) -> None:
    columns = {"r1": "r1_sum", "rounds": {"name": f"{OWN}.Rounds"}}
    study = loaded(columns=columns, claims={"method": ["prox > tiny on r1"]})
    heard: set[str] = set()
    first = run(study, tmp_path / "out", listener=lambda progress: heard.update(progress.running.values()))
    assert first.ended.failures == {}
    assert first.ended.missing == ()
    assert heard - {""}
    (cell, *_) = first.results.cells.values()
    folder = tmp_path / "cells" / cell
    assert first.results.at("tiny", (), "r1")[0] == open_run(folder).metrics()["r1_sum"]
    assert first.results.at("tiny", (), "rounds") == {0: 1.0, 1: 1.0}
    assert first.results.replies == {row: [0, 0] for row in study.rows}
    assert files(folder) >= {"config.yaml", "metrics.jsonl", "figures.json"}
    assert not files(folder) & {"models", "checkpoints", "arrays"}
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")}
    again = run(study, tmp_path / "other")  # another study with the same cells
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").rglob("*")} == before
    assert again.results.to_json() == first.results.to_json() == Results.load(tmp_path / "other").to_json()


@pytest.mark.slow
def test_failures_are_cells_with_a_cause(loaded: Load, tmp_path: Path) -> None:
    columns = {"r1": "r1_sum", "killed": {"name": f"{OWN}.Killed", "marker": str(tmp_path / "marker")}}
    columns["none"] = {"name": "holdings", "of": "paired", "column": "hue", "value": "red"}
    study = loaded(seeds=1, rows={"broken": BROKEN, "tiny": {}}, columns=columns)
    ended = run(study, tmp_path / "out").ended
    assert set(ended.failures) == {"broken, seed 0", "tiny, seed 0"}
    assert "was there too little memory" in ended.failures["tiny, seed 0"]
    again = run(study, tmp_path / "out")
    assert set(again.ended.failures) == {"broken, seed 0"}
    assert again.results.at("tiny", (), "killed") == {0: 1.0}
    assert again.results.at("tiny", (), "none") == {}
    assert "the partition has no 'hue'" in again.results.causes["tiny, seed 0: none"]


def test_a_full_disk_ends_the_study_with_its_reason(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=2, columns={"r1": "r1_sum", "full": {"name": f"{OWN}.FullDisk"}})
    ended = run_study(study, tmp_path / "out", jobs=1).ended
    assert "no space left on the disk (cell); free some" in ended.stopped
    assert len(ended.missing) == 4


@pytest.mark.slow
def test_removed_and_edited_cells(loaded: Load, tmp_path: Path) -> None:
    study = loaded()
    first = run(study, tmp_path / "out").results
    removed, edited = (tmp_path / "cells" / first.cells[label] for label in ("tiny, seed 0", "prox, seed 1"))
    shutil.rmtree(removed)
    with (edited / "config.yaml").open("a") as stream:
        stream.write("# changed\n")
    second = run(study, tmp_path / "out")
    assert list(second.ended.failures) == ["prox, seed 1"]
    assert "was edited after the run" in second.ended.failures["prox, seed 1"]
    assert second.results.at("tiny", (), "r1") == first.at("tiny", (), "r1")
    shutil.rmtree(edited)
    assert run(study, tmp_path / "out").results.to_json() == first.to_json()


@pytest.mark.slow
def test_a_new_column_of_models_runs_cells_again_that_did_not_keep_them(loaded: Load, tmp_path: Path) -> None:
    run(loaded(seeds=1), tmp_path / "out")
    more = {"columns": {"r1": "r1_sum", "models": {"name": f"{OWN}.OfModels"}}, "seeds": 1}
    results = run(loaded(**more), tmp_path / "out").results
    assert results.at("tiny", (), "models")[0] > 0
    folder = tmp_path / "cells" / results.cells["tiny, seed 0"]
    assert "models" not in files(folder)
    shutil.rmtree(folder)
    run(loaded(**more, keep="models"), tmp_path / "out")
    assert "models" in files(folder)


@pytest.mark.slow
def test_rows_of_an_invocation_and_its_budget(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=1, rows={"extra": {"main": False}, "tiny": {"set": {"run.rounds": 2}}})
    only = run(study, tmp_path / "out", only=["tiny"])
    assert set(only.results.cells) == {"tiny, seed 0"}
    assert (only.results.at("extra", (), "r1"), only.ended.missing) == ({}, ())
    spent = run(study, tmp_path / "out", budget=0.0).ended
    assert (spent.missing, spent.stopped) == (("extra, seed 0",), "the budget is spent; the same command goes on")
    with pytest.raises(ConfigError, match="--only tidy: no such row; did you mean 'tiny'"):
        run(study, tmp_path / "out", only=["tidy"])


def test_nothing_is_begun_where_a_row_is_wrong(loaded: Load, tmp_path: Path) -> None:
    study = loaded(rows={"tiny": {}, "wrong": {"set": {"run.rounds": 0}}})
    with pytest.raises(ConfigError, match=r"row 'wrong': run\.rounds"):
        run(study, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cells").exists()


@pytest.mark.slow
def test_rows_and_a_twin_are_tuned_alike_by_each_seed(loaded: Load, tmp_path: Path) -> None:
    creamfl = {"set": {"algorithm": {"name": "creamfl", "local_epochs": 1}, "server.validation_split": "validation"}}
    tuning = {
        "settings": {"rate": {"paths": ["server.training.optimizer.lr"]}},
        "candidates": 3,
        "column": {"metric": "r1_sum", "kind": "validation"},
    }
    study = loaded(rows={"method": creamfl, "alone": creamfl | {"twin": "server-only"}}, tuning=tuning, seeds=2)
    done = run(study, tmp_path / "out")
    assert done.ended.failures == {}
    for row in ("method", "alone"):
        for seed in (0, 1):
            assert list(done.results.chosen[row, (), seed].scores) == ["as given", "rate x 2", "rate x 0.5"]
        assert len(done.results.at(row, (), "r1")) == 2
    cells = set(tmp_path.glob("cells/*/figures.json"))
    assert len(cells) == 2 * 2 * 3  # what is chosen is a candidate
    lost = StudyPlan(study, Places(), tmp_path / "cells").search("method", (), 0)[0].folder(tmp_path / "cells")
    shutil.rmtree(lost)  # as a kill in the middle of a search leaves it: the row has no choice, and the other one has
    assert run(study, tmp_path / "out").results.to_json() == done.results.to_json()
    assert set(tmp_path.glob("cells/*/figures.json")) == cells


@pytest.mark.slow
def test_the_rows_of_an_undecided_claim_have_a_second_look(loaded: Load, tmp_path: Path) -> None:
    rows = tiny_study()["rows"] | {"third": {"set": {"run.rounds": 2}}}
    columns = {"r1": {"metric": "r1_sum", "effect": 0.0}}
    study = loaded(rows=rows, columns=columns, seeds=5, claims={"method": ["prox > tiny on r1"], "more_seeds": 2})
    results = run(study, tmp_path / "out").results
    seeds = {row: sorted(results.at(row, (), "r1")) for row in rows}
    assert seeds == {"tiny": [*range(7)], "prox": [*range(7)], "third": [*range(5)]}
    (item,) = results.judgements()
    assert (item.verdict, len(item.sample.seeds)) == ("undecided", 7)


def test_two_invocations_do_not_work_on_one_study(loaded: Load, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process works on the study"):
            run(loaded(), tmp_path / "out")


@pytest.mark.slow
def test_twelve_cells_killed_five_times_give_the_same_bytes(study_file: Callable[..., Path], tmp_path: Path) -> None:
    axes = {"rounds": {"setting": "run.rounds", "values": [2, 3]}}
    path = study_file(tiny_study(seeds=3, axes=axes, claims={"method": ["prox > tiny on r1 at all"]}))
    draw = random.Random(0)

    def command(out: Path) -> list[str]:
        return [sys.executable, "-m", "polyfed", "study", "run", str(path), "--out", str(out), "--jobs", "2"]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path / "whole" / "s"), env=environment, check=True, capture_output=True)
    for _ in range(5):
        process = subprocess.Popen(
            command(tmp_path / "killed" / "s"), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(draw.uniform(4, 12))
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = subprocess.run(command(tmp_path / "killed" / "s"), env=environment, check=True, capture_output=True)
    assert b"failed" not in last.stdout
    for name in ("results.json", "study.yaml"):
        assert (tmp_path / "killed" / "s" / name).read_bytes() == (tmp_path / "whole" / "s" / name).read_bytes()
    cells = sorted(path.name for path in (tmp_path / "whole" / "cells").iterdir() if path.is_dir())
    assert len(cells) == 12
    for cell in cells:
        both = [(tmp_path / side / "cells" / cell / "metrics.jsonl").read_bytes() for side in ("whole", "killed")]
        assert both[0] == both[1]


ROWS: dict[str, Any] = {
    "server": {},
    "clients": {"like": "server", "columns": {"r1": {"of": "paired"}, "MiB": None}},
    "worst client": {"like": "clients", "columns": {"r1": {"of": "paired", "over": "worst"}}},
}


def test_they_share_a_cell_and_have_columns_of_their_own(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=1, rows=ROWS, claims={"method": ["clients > worst client on r1"]})
    results = run_study(study, tmp_path / "out", jobs=1).results
    (cell,) = set(results.cells.values())
    records = open_run(tmp_path / "cells" / cell).records
    own = [records.last(client)["r1_sum"] for client in records.groups["paired"]]
    assert results.at("server", (), "r1") == {0: records.last("server")["r1_sum"]}
    assert results.at("clients", (), "r1") == {0: pytest.approx(fmean(own))}
    assert results.at("worst client", (), "r1") == {0: min(own)}
    assert results.at("server", (), "MiB") != {}
    assert results.at("clients", (), "MiB") == results.at("worst client", (), "MiB") == {}
    assert results.causes == {}


def test_columns_of_a_cell_are_those_of_all_rows_that_are_the_same_run(loaded: Load, tmp_path: Path) -> None:
    study = loaded(seeds=1, rows=ROWS | {"later": {"like": "clients", "set": {"run.rounds": 2}}})
    plan = StudyPlan(study, Places(), tmp_path)
    cells = {row: plan.cell(row, (), 0) for row in study.rows}
    assert {cells[row].digest for row in ROWS} == {cells["server"].digest} != {cells["later"].digest}
    measured = {row: [getattr(column, "over", "traffic") for column in plan.columns(cells[row])] for row in cells}
    assert measured["later"] == ["mean"]
    assert [measured[row] for row in ROWS] == [["mean", "traffic", "mean", "worst"]] * len(ROWS)
