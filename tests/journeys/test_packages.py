"""The wheel with the newest and with the oldest of every package that it asks for: ``make test-packages``.

The oldest are the lower bounds of ``pyproject.toml``, and this is what proves them. What these packages need in turn is
the newest in both. PyTorch is the version that the tests run with, as another would bring gigabytes.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

from polyfed import __version__
from polyfed.cli.main import app

ROOT = Path(__file__).parents[2]
TORCH = f"torch=={version('torch').partition('+')[0]}"
Program = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.slow

WORKING = {
    "list": "scenes-demo",
    "list methods creamfl": "local_epochs",
    "run tiny.yaml --dry-run": "nothing was written",
    "run tiny.yaml --rounds 1 --out runs/tiny": "open runs/tiny/report.html",
    "resume runs/tiny": "open runs/tiny/report.html",
    "run runs/tiny/config.yaml --out runs/again": "open runs/again/report.html",
    "evaluate runs/tiny --data scenes": "r1_sum",
    "export runs/tiny": "exported and checked: runs/tiny/export",
    "compare runs/tiny runs/again": "Comparison",
    "report runs/tiny": "written: runs/tiny/report.html",
    "gallery runs/tiny --queries 1": "gallery.html",
    "watch runs/tiny": "open runs/tiny/report.html",
    "analyse partition runs/tiny": "paired-0",
    "prepare texts.csv data/texts": "report.json",
    "init own.yaml --texts texts.csv": "own.yaml",
    "doctor": "torch",
    "demo": "One seed proves nothing",
}
"""Command -> what it prints, in this order."""
WRONG = """
rnu
--nosuch
--version=3
run
run --nosuch
run nosuch
run nosuch.yaml
run broken.yaml
run list.yaml
run tiny.yaml extra
run tiny.yaml --out
run tiny.yaml --seed abc
run tiny.yaml --seed 1 --seed 2
run tiny.yaml --seed 1 --seeds 1,2
run tiny.yaml --rounds 0
run tiny.yaml --engine nosuch
run tiny.yaml --device nosuch
run tiny.yaml --data-dir nosuch
run tiny.yaml --set run.rounds
run tiny.yaml --set run.rouns=1
run tiny.yaml --set algorithm=nosuch
run tiny.yaml --set algorithm=nosuch.Method
demo extra
list nosuch
list methods creaml
init own.yaml
init own.yaml --pairs nosuch
init own.yaml --texts texts.csv --clients x
prepare texts.csv
resume nosuch
report
watch .
evaluate runs/tiny
evaluate runs/tiny --data nosuch
downstream runs/tiny --suite nosuch
analyse nosuch runs/tiny
export runs/tiny --format nosuch
compare runs/tiny nosuch
compare runs/tiny --metric nosuch
study
study nosuch
study run nosuch.yaml
deploy
deploy key
deploy check nosuch
""".strip().splitlines()


def oldest() -> list[str]:
    """Lower bound of each package of the base as the one version to install, PyTorch's as it is."""
    base = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    bounds = {each.name: bound.version for each in base for bound in each.specifier if bound.operator == ">="}
    return [f"{name}=={bound}" for name, bound in bounds.items() if name != "torch"]


@pytest.fixture(scope="module", params=["newest", "oldest"])
def programs(request: pytest.FixtureRequest, wheel: Path, environment: Callable[..., Path]) -> Path:
    """Folder with the programs of an environment that has the wheel and the newest or oldest packages."""
    return environment(str(wheel), TORCH, *(oldest() if request.param == "oldest" else ()))


@pytest.fixture(scope="module")
def polyfed(programs: Path, workplace: Callable[[], Program]) -> Program:
    """Runs a command of the wheel in a folder that has what the commands name."""
    start = workplace()
    write = "from pathlib import Path as P; P('broken.yaml').write_text('a: [1'); P('list.yaml').write_text('- a'); "
    write += "P('texts.csv').write_text('text,kind\\n' + ''.join(f'word{i} of {i % 7},k{i % 2}\\n' for i in range(60)))"
    start([str(programs / "python"), "-c", write]).check_returncode()
    return lambda command: start([str(programs / "polyfed"), *command.split()])


def commands(group: typer.core.TyperGroup, name: str = "") -> Iterator[str]:
    for below, command in group.commands.items():
        yield f"{name}{below}"
        yield from commands(command, f"{name}{below} ") if hasattr(command, "commands") else ()


@pytest.mark.parametrize("command", WORKING)
def test_a_command_works(polyfed: Program, command: str) -> None:
    done = polyfed(command)
    assert done.returncode == 0, done.stderr
    assert WORKING[command] in done.stdout


def test_each_command_has_its_help(polyfed: Program) -> None:
    for command in ("", *commands(typer.main.get_command(app))):
        done = polyfed(f"{command} --help")
        assert done.returncode == 0, (command, done.stderr)
        assert f"Usage: polyfed {command}".strip() in done.stdout


def test_the_program_starts_as_a_module(programs: Path, workplace: Callable[[], Program]) -> None:
    done = workplace()([str(programs / "python"), "-m", "polyfed", "--version"])
    assert (done.returncode, done.stdout) == (0, f"polyfed {__version__}\n")


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_ends_in_one_line(polyfed: Program, command: str) -> None:
    done = polyfed(command)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
