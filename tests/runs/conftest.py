"""Runs of CreamFL over three rounds, finished and stopped, which tests copy and damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import polyfed
from misbehaving import contents, creamfl, interrupted
from polyfed.runs.experiment import Experiment
from small_federations import Config


@pytest.fixture
def config(tiny: Config) -> Config:
    return creamfl()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of ``config`` that nothing happened to; not to be changed."""
    return polyfed.run(Experiment.parse(creamfl()), tmp_path_factory.mktemp("undisturbed") / "run", quiet=True).folder


@pytest.fixture(scope="session")
def complete(undisturbed: Path) -> dict[str, bytes]:
    """Files of an uninterrupted run of ``config``."""
    return contents(undisturbed)


@pytest.fixture
def finished(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of the run that nothing happened to."""
    return Path(shutil.copytree(undisturbed, tmp_path / "a"))


@pytest.fixture(scope="session")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Gives the folder of a run of ``config`` that was stopped in a round; not to be changed."""
    folders: dict[int, Path] = {}

    def stopped(at: int) -> Path:
        if at not in folders:
            folders[at] = tmp_path_factory.mktemp("stopped") / "run"
            interrupted(creamfl(), folders[at], folders[at].parent / "marker", at)
        return folders[at]

    return stopped


@pytest.fixture
def stopped(stopped_once: Callable[[int], Path], tmp_path: Path) -> Callable[..., Path]:
    """Gives a copy of a run that was stopped in a round."""
    return lambda at: Path(shutil.copytree(stopped_once(at), tmp_path / "a"))
