"""Studies of tests: the tiny experiment in two rows, whose cells take a second each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import polyfed
from polyfed.lab.studies.study import Study
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run, open_run
from small_federations import tiny_experiment

Content = dict[str, Any]


def tiny_study(**more: Any) -> Content:
    """Two rows on the tiny experiment, a round each."""
    rows = {"tiny": {}, "prox": {"set": {"algorithm": {"name": "fedprox", "local_epochs": 1}}}}
    content = {"title": "tiny", "base": "tiny.yaml", "set": {"run.rounds": 1}, "seeds": 2, "rows": rows}
    return content | {"columns": {"r1": "r1_sum", "MiB": {"name": "traffic"}}} | more


@pytest.fixture(autouse=True)
def cells_are_forked_from_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the process that only imports, which takes seconds; ``test_study_command`` has one."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)


@pytest.fixture
def study_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes a study and its base experiment; gives the study's file."""

    def write(content: Content) -> Path:
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_experiment()))
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def loaded(study_file: Callable[..., Path]) -> Callable[..., Study]:
    """A study of ``tiny_study`` with changes."""
    return lambda **more: Study.load(study_file(tiny_study(**more)))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the tiny experiment, two rounds, whose image clients are tested on validation data."""
    changes = ["run.rounds=2", "run.output.plots=false", "clients.image.test_split=validation"]
    folder = tmp_path_factory.mktemp("finished") / "run"
    return open_run(polyfed.run(Experiment.load(tiny_experiment(), changes), folder, quiet=True).folder)
