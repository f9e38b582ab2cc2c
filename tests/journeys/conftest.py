"""The wheel, and environments of their own in which its programs run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from small_federations import tiny_experiment

ROOT = Path(__file__).parents[2]
Start = Callable[[list[str]], subprocess.CompletedProcess[str]]


def _pip(python: Path | str, *arguments: str) -> None:
    """Run pip, or skip if it cannot: there may be neither pip nor a network nor a local index."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        assert "ResolutionImpossible" not in reason, done.stderr
        pytest.skip(f"pip {arguments[0]} does not work here: {reason}")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one in dist/ that ``make dist`` has just built, else one that is built now."""
    if built := [*(ROOT / "dist").glob("polyfed-*.whl")]:
        return built[0]
    folder = tmp_path_factory.mktemp("wheel")
    _pip(sys.executable, "wheel", str(ROOT), "--no-deps", "-w", str(folder))
    return next(folder.glob("polyfed-*.whl"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Arguments of ``pip install`` -> folder with the programs of a new environment that has what they name."""

    def install(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        _pip(folder / "bin" / "python", "install", *arguments)
        return folder / "bin"

    return install


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Start]:
    """Makes a folder that holds ``tiny.yaml``, and gives a function that runs a program in it."""

    def make() -> Start:
        folder = tmp_path_factory.mktemp("work")
        (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny_experiment()))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        variables = {"POLYFED_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        variables["WANDB_MODE"] = "offline"
        return partial(subprocess.run, capture_output=True, text=True, cwd=folder, env={**kept, **variables})

    return make
