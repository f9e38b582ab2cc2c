"""The wheel as ``pip install polyfed`` gives it: in an environment without extras every other command works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from journeys.test_packages import WORKING
from small_federations import tiny_experiment

ROOT = Path(__file__).parents[2]
NOISE = '{"reply":{"weights":1,"noise_multiplier":1},"metrics":"clear"}'
RAY = "ray     Steps execute in Ray workers, on this machine or on the nodes of a cluster (not installed: "
WITHOUT_EXTRA = {
    **{command: shown for command, shown in WORKING.items() if "texts.csv" not in command},
    "list engines": RAY,
    "list engines ray": "workers: null",
    "deploy --help": "Train across institutions",
}
"""Command -> text that it prints, in this order."""
Run = Callable[..., subprocess.CompletedProcess[str]]
Install = Callable[[str], Path]


@pytest.fixture(scope="module")
def installed(wheel: Path, environment: Callable[..., Path]) -> Install:
    """Extra or "" -> folder with the programs of an environment that has the wheel, this extra and no other."""

    @cache
    def install(extra: str) -> Path:
        return environment("-c", str(ROOT / "constraints.txt"), f"{wheel}[{extra}]" if extra else str(wheel))

    return install


@pytest.fixture(scope="module")
def polyfed(installed: Install, workplace: Callable[[], Run]) -> Run:
    """Runs a command of the wheel, bare or with an extra, in one folder that all tests here share."""
    start = workplace()

    def call(*arguments: str, extra: str = "") -> subprocess.CompletedProcess[str]:
        return start([str(installed(extra) / "polyfed"), *arguments])

    return call


@pytest.mark.slow
def test_it_has_the_runner_and_no_study_of_a_paper(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "polyfed/lab/studies/study_files.py" in names
    assert [
        name for name in names if name.startswith("papers/") or ("studies/" in name and name.endswith(".yaml"))
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "shown"), WITHOUT_EXTRA.items())
def test_a_command_needs_no_extra(polyfed: Run, arguments: str, shown: str) -> None:
    done = polyfed(*arguments.split())
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.slow
def test_the_source_archive_builds_the_site(installed: Install, tmp_path: Path) -> None:
    archives = [*(ROOT / "dist").glob("polyfed-*.tar.gz")]
    if not archives:
        command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(ROOT)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("build does not work here: there may be no index")
    with tarfile.open(*archives or tmp_path.glob("polyfed-*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    command = [str(installed("docs") / "python"), "-m", "mkdocs", "build", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=unpacked)
    assert done.returncode == 0, done.stderr
    assert (unpacked / "site" / "how-to" / "which-method.html").is_file()


@pytest.mark.slow
def test_every_command_that_a_run_prints_works(polyfed: Run) -> None:
    output = polyfed(*["run", "tiny.yaml", "--rounds", "1", "--out", "runs/printed"]).stdout
    printed = re.findall(r"^\w+ +polyfed (.+?)(?=^\w|\Z)", output.rpartition("report   open")[2], re.M | re.S)
    assert len(printed) == 4
    for command in printed:
        done = polyfed(*command.replace("OTHER_RUN", "runs/printed").split())
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.slow
def test_the_readme_runs_as_it_stands(installed: Install, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.S)
    python = [str(installed("") / "python"), "-c", block]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(python, capture_output=True, text=True, cwd=tmp_path, env=kept)
    assert done.returncode == 0, done.stderr
    assert "r1_sum" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("run tiny.yaml --engine ray --out runs/ray", "ray"),
        ("run tiny.yaml --engine flower --out runs/flower", "flower"),
        ("deploy key .", "deploy"),
        ("downstream runs/tiny --suite scenes", "lab"),
        ("run four-modalities --dry-run", "sounds"),
        (f"run tiny.yaml --set privacy={NOISE} --out noisy", "privacy"),
    ],
)
def test_a_command_without_its_extra_names_the_extra(polyfed: Run, arguments: str, extra: str) -> None:
    done = polyfed(*arguments.split())
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f'pip install "polyfed[{extra}]"' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("ray", "run tiny.yaml --rounds 1 --set run.engine.name=ray"),
        ("flower", "run tiny.yaml --rounds 1 --set run.engine.name=flower"),
        ("tensorboard", "run tiny.yaml --rounds 1 --set run.output.sinks=[tensorboard]"),
        ("wandb", "run tiny.yaml --rounds 1 --set run.output.sinks=[wandb]"),
        ("privacy", f"run tiny.yaml --rounds 1 --set privacy={NOISE}"),
    ],
)
def test_an_extra_alone_is_enough(polyfed: Run, extra: str, arguments: str) -> None:
    done = polyfed(*arguments.split(), "--out", f"with-{extra}", extra=extra)
    assert done.returncode == 0, done.stderr
    assert f"with-{extra}" in done.stdout


@pytest.mark.slow
def test_a_federation_is_set_up_with_its_extra_alone(polyfed: Run) -> None:
    assert polyfed("deploy", "key", "site", extra="deploy").returncode == 0


@pytest.mark.slow
def test_dp_sgd_needs_its_extra_alone(polyfed: Run, tmp_path: Path) -> None:
    """Image clients alone, as the loss of pairs compares samples with each other."""
    content: dict[str, Any] = tiny_experiment()
    del content["clients"]["paired"], content["server"]
    content["clients"]["image"]["model"]["encoders"]["image"]["norm"] = "group"
    content |= {"public": None, "privacy": {"samples": {"noise_multiplier": 1.0}, "metrics": "clear"}}
    (file := tmp_path / "dp-sgd.yaml").write_text(yaml.safe_dump(content))
    done = polyfed("run", str(file), "--rounds", "1", "--out", "runs/dp-sgd", extra="privacy")
    assert done.returncode == 0, done.stderr
    assert "replies of clients are differentially private" in done.stdout + done.stderr
