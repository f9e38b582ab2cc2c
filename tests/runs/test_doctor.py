"""Problems that the doctor reports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyfed.runs import environment as doctor
from polyfed.runs.environment import observations

Cli = Callable[..., tuple[int, str, str]]


def test_a_machine_without_faults(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    for variable in ("POLYFED_DATA", "POLYFED_WEIGHTS"):
        monkeypatch.delenv(variable, raising=False)
    code, out, err = cli("doctor")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "no problems found"
    for word in (f"torch {torch.__version__.partition('+')[0]}", "cores", "GiB free", "extra ray", f"{tmp_path}/cache"):
        assert word in out


def test_what_stands_in_the_way_has_a_remedy(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYFED_DATA", str(tmp_path / "none"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    code, out, _ = cli("doctor")
    assert code == 1
    assert "the folder of data sets does not exist; correct or unset POLYFED_DATA" in out
    assert "too little; make room" in out
    if not torch.cuda.is_available():
        assert "this torch has no CUDA; install one that has" in out
    assert out.splitlines()[-1].endswith(" found")


def test_a_torchvision_of_another_build_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1" if name == "torchvision" else version(name))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    (seen,) = [item for item in observations(tmp_path) if item.name == "torchvision"]
    assert seen.remedy.endswith("pip uninstall torchvision")
