"""The page on studies is correct: its file runs, its rows are what they are called, its Python runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from polyfed.lab.studies.column import ColumnSettings
from polyfed.lab.studies.results import Results
from polyfed.lab.studies.runner import run_study
from polyfed.lab.studies.study import Study
from polyfed.lab.studies.tables import study_tables
from polyfed.runs.opened import open_run
from small_federations import tiny_experiment

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-study.md"
OURS = "from polyfed.algorithms.creamfl import CreamFL\n\n\nclass Ours(CreamFL):\n    pass\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all that the page takes for granted, in which the reader stands: data, a method, and its file."""
    mine, *_ = blocks("yaml")
    content = tiny_experiment() | {"algorithm": {"name": "creamfl", "local_epochs": 1}}
    content["data"]["sources"]["scenes"] |= {"train": 1100}
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "mine.yaml").write_text(mine)
    (tmp_path / "mymethods").mkdir()
    (tmp_path / "mymethods" / "ours.py").write_text(OURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mymethods", "mycolumns")]:
        del sys.modules[name]


@pytest.mark.slow
def test_it_runs_and_so_does_its_python(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Study.load("mine.yaml", "smoke")
    done = run_study(study, shop / "runs" / "studies" / "mine", jobs=2)
    assert done.ended.failures == {}
    assert done.results.causes == {}
    point = study.points[0]
    measured = {(row, column) for row in study.rows for column in study.columns if done.results.at(row, point, column)}
    assert measured == {*((row, column) for row in study.rows for column in study.columns_of(row))}
    assert study_tables(done.results)
    column, script, opened = blocks("python")
    (shop / "mine.yaml").write_text(yaml.safe_dump(study.content(), sort_keys=False))
    exec(script, {})  # of the same cells
    assert float(capsys.readouterr().out) > 0
    exec(opened, {})
    assert "server alone" in capsys.readouterr().out
    (shop / "mycolumns.py").write_text(column)
    excluded = ColumnSettings.model_validate({"name": "mycolumns.Excluded"})
    (cell, *_) = Results.load(shop / "runs" / "studies" / "mine").cells.values()
    assert excluded.measure(open_run(shop / "runs" / "studies" / "cells" / cell)) == 0
