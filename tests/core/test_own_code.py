"""Digests of components from outside polyfed: of their module and of its imports from the same package alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.declarations import own_code
from polyfed.core.settings import Settings

OURS = """
from polyfed.core.settings import Settings
import json
from mymethods.parts import weight
from . import deep
class Ours(Settings):
    rate: float = 1.0
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``mymethods`` with two methods, a module that one imports, one that this imports in turn, and one aside."""
    folder = tmp_path / "mymethods"
    (folder / "deep").mkdir(parents=True)
    for name, text in {
        "ours.py": OURS,
        "theirs.py": OURS.replace("from . import deep", ""),
        "parts.py": "def weight():\n    from .deep.inner import one\n    return one",
        "deep/__init__.py": "",
        "deep/inner.py": "one = 1",
        "aside.py": "",
        "__init__.py": "",
    }.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "mymethods"]:
        del sys.modules[name]


def settings(module: str) -> Settings:
    importlib.invalidate_caches()
    made: Settings = importlib.import_module(module).Ours()
    return made


def test_modules_of_its_package_count_and_others_do_not(package: Path) -> None:
    known = own_code(settings("mymethods.ours"))["own_code"]
    assert {*known} == {"mymethods", *(f"mymethods.{name}" for name in ("ours", "parts", "deep", "deep.inner"))}
    assert own_code(FedAvg()) == {}


def test_components_at_any_depth_count(package: Path) -> None:
    class Holder(Settings):
        parts: list[Settings]
        by_name: dict[str, Settings]

    inner = settings("mymethods.theirs")
    Holder.__module__ = FedAvg.__module__
    for holder in (Holder(parts=[inner], by_name={}), Holder(parts=[], by_name={"a": inner})):
        assert "mymethods.theirs" in own_code(holder)["own_code"]


def test_methods_of_two_files_differ(package: Path) -> None:
    first, second = (own_code(settings(f"mymethods.{name}")) for name in ("ours", "theirs"))
    assert first != second
