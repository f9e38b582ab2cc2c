"""A configuration that somebody handed over names no module of the folder in which the program happens to start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """\
extends: scenes-demo
algorithm: planted.Method
"""


def started(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_modules_of_the_working_folder_are_not_imported(folder: Path) -> None:
    done = started(folder, "-m", "polyfed.cli", "run", "config.yaml", "--out", "out")
    assert done.returncode == 2, done.stderr
    assert "cannot import 'planted.Method'" in done.stderr
    assert not (folder / "ran").exists()
    assert not (folder / "out").exists()


def test_what_is_put_on_the_path_is_imported(folder: Path) -> None:
    done = started(folder, "-m", "polyfed.cli", "run", "config.yaml", "--out", "out", PYTHONPATH=str(folder))
    assert done.returncode == 2, done.stderr
    assert (folder / "ran").exists()  # it has no Method, but that was asked of it
