"""A configuration that somebody handed over names no module of the folder in which the program happens to start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyfed.cli.console import forget_working_folder

CONFIG = """\
extends: scenes-demo
algorithm: planted.Method
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.slow
def test_modules_of_the_working_folder_are_not_imported(folder: Path) -> None:
    command = [sys.executable, "-m", "polyfed", "run", "config.yaml", "--out", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot import 'planted.Method'" in done.stderr
    assert not (folder / "ran").exists()
    assert not (folder / "out").exists()


def test_what_is_put_on_the_path_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [str(folder), str(folder), "others"])  # the first is of ``python -m``
    forget_working_folder()
    assert sys.path == [str(folder), "others"]
