"""Forked workers report what one process reports, and a worker that dies fails its test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = """
import os, warnings
from pathlib import Path

import pytest

@pytest.fixture(scope="session", autouse=True)
def worker():
    yield
    Path(f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(20))
def test_passes(number, tmp_path, capfd):
    print(number)
    assert capfd.readouterr().out == f"{number}\\n"
    assert not list(tmp_path.iterdir())

def test_warns():
    warnings.warn("of a worker", FutureWarning)

def test_dies():
    os._exit(7)

def test_fails():
    print("printed")
    assert [1, 2] == [1, 3]

def test_skips():
    pytest.skip("why")
"""


def _run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text('pytest_plugins = ["forked"]\n')
    for name in ("test_a.py", "test_b.py"):
        (folder / name).write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir=.", "--workers=2", "--junitxml=junit.xml", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_all_outcomes_reach_the_summary_and_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    code, text = _run(tmp_path)
    assert code == 1
    assert "4 failed, 42 passed, 2 skipped, 2 warnings" in text
    for part in (
        "the worker of this test died: exit status 7",
        "At index 1 diff: 2 != 3",
        "printed",
        "FutureWarning: of",
    ):
        assert text.count(part) >= 2, text
    assert "CPU seconds: " in text
    cases = ElementTree.parse(tmp_path / "junit.xml").findall(".//testcase")
    assert len({(case.get("classname"), case.get("name")) for case in cases}) == len(cases) == 48
    assert len(list(tmp_path.glob("ended-*"))) == 2  # of four workers two died


@pytest.mark.parametrize(("options", "code"), [(["-x"], 1), (["-k", "passes"], 0), (["-k", "nothing"], 5)])
def test_exit_codes_are_those_of_one_process(tmp_path: Path, options: list[str], code: int) -> None:
    assert _run(tmp_path, *options)[0] == code
