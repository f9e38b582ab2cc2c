"""Components, unimported; digests of those from outside polyfed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyfed
from polyfed.algorithms.fedavg import FedAvg
from polyfed.cli import catalogue
from polyfed.core import declarations
from polyfed.core.declarations import components, homes_of, own_code
from polyfed.core.extras import extra_with, how_to_install, is_installed
from polyfed.core.settings import Settings

FAMILIES = {component: place[:2] for component, place in catalogue.FAMILIES.items()}
WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"flwr", "ray", "cryptography", "tensorboard", "wandb"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def imported(family: type[Settings]) -> dict[str, str]:
    """The slow way: import every module of the family's homes and look."""
    names: dict[str, str] = {}
    for place in map(importlib.import_module, homes_of(family.family().home)):
        paths = getattr(place, "__path__", None)
        inner = [f"{place.__name__}.{info.name}" for info in pkgutil.iter_modules(paths)] if paths else [place.__name__]
        for module in map(importlib.import_module, inner):
            kinds = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, family)]
            for one in [one for one in kinds if one.__module__ == module.__name__ and not one.__name__.startswith("_")]:
                if not inspect.isabstract(one):
                    names[vars(one).get("short_name", module.__name__.rpartition(".")[2])] = one.__name__
    return names


@pytest.mark.parametrize("component", FAMILIES)
def test_source_has_the_same_components_as_import(component: str) -> None:
    pytest.importorskip("flwr")  # modules of its engine import it
    module, name = FAMILIES[component]
    family: type[Settings] = getattr(importlib.import_module(module), name)
    declared = {short: item.name for short, item in components(family.family().home, (module, name)).items()}
    assert declared == imported(family)
    assert {short: component.__name__ for short, component in family.available().items()} == declared


@pytest.mark.parametrize("line", ["# a comment", '"""\na text\n"""'])
def test_a_body_may_have_lines_without_indentation(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / f"of_a_user_{'comment' if '#' in line else 'text'}"
    package.mkdir()
    (package / "__init__.py").touch()
    body = f"class Mine:\n    def work(self):\n        x = (1,\n{line}\n        )\n        return x\n"
    (package / "own.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    assert list(declarations.class_declarations(f"{package.name}.own")) == ["Mine"]


def test_bodies_of_functions_change_nothing_that_classes_declare() -> None:
    for module in [info.name for info in pkgutil.walk_packages(polyfed.__path__, "polyfed.") if not info.ispkg]:
        source = Path(str(importlib.util.find_spec(module).origin)).read_text("utf-8")  # type: ignore[union-attr]
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        declared = declarations.class_declarations(module)
        assert list(declared) == [node.name for node in classes], module
        for node in classes:
            assert declared[node.name] == declarations._declared(node, module, declared[node.name].imported)


def without_extras(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_engines_are_known_where_their_packages_are_not() -> None:
    code = "from polyfed.engines.engine import EngineSettings as E; print(*E.available(), E.named('ray').pip_extra)"
    assert without_extras(code) == "flower local ray ray\n"


def test_a_command_in_need_of_an_extra_names_the_command_that_installs_it() -> None:
    code = "from polyfed.cli.main import main; print(main(['deploy', 'key', '.']), end='')"
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS + code], capture_output=True, text=True)
    remedy = "error: this needs the package 'cryptography', which is not installed; pip install \"polyfed[deploy]\"\n"
    assert (done.stdout, done.stderr) == ("2", remedy)


@pytest.mark.parametrize(("module", "extra"), [("flwr.app", "deploy"), ("ray", "flower"), ("wandb", "wandb")])
def test_a_module_has_its_extra(module: str, extra: str) -> None:
    assert extra_with(module) == extra
    assert extra_with("os.path") is None


def test_a_component_without_its_extra_is_listed_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyfed.cli.catalogue.is_installed", lambda extra: extra != "ray")
    entries = catalogue.entries("engines")
    assert entries["ray"].endswith(f"(not installed: {how_to_install('ray')})")
    assert "not installed" not in entries["local"] + entries["flower"]
    assert is_installed("none of that name")


# ---- digests of components from outside polyfed


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
