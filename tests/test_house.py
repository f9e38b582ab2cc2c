"""The rules of the house hold, and each check detects a violation."""

from __future__ import annotations

from pathlib import Path

import pytest

import house
import rooms
from house import classes, fields
from imports import Module, cycles, imports, modules, upward

TEXT = '''"""Module."""

# comment
import os


class A:
    """Class,
    of two lines."""

    size = 1  # of something
    """Not the docstring of a class."""


def f() -> str:
    """Function."""
    return """
# no comment
"""
'''


@pytest.fixture(scope="module")
def parts() -> list[Module]:
    """All modules of polyfed."""
    return modules(Path(__file__).parents[1] / "src" / "polyfed")


@pytest.mark.parametrize("rule", sorted(house.RULES))
def test_every_rule_holds(rule: str, parts: list[Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert house.RULES[rule](parts) == []


def test_lines_of_code_are_counted_by_room(tmp_path: Path) -> None:
    # import, class, size, its text, def, and the returned text without the line that looks like a comment
    assert rooms.code_lines(TEXT) == 7
    (tmp_path / "wire" / "deep").mkdir(parents=True)
    for place in ("loose.py", "wire/one.py", "wire/deep/two.py"):
        (tmp_path / place).write_text(TEXT)
    assert rooms.rooms(tmp_path) == {"top": 7, "wire": 14}


def test_figures_only_fall() -> None:
    may = {"core": 10, "gone": 5, "wire": 20}
    held = {"core": 12, "new": 1, "wire": 15}
    assert rooms.over(held, may) == [
        "core holds 12 code lines, its figure is 10",
        "new holds 1 code lines, its figure is 0",
    ]
    assert rooms.lowered(may, held) == {"core": 10, "wire": 15}


def test_the_file_of_figures_is_read_as_it_is_written(tmp_path: Path) -> None:
    zones = {"source": {"core": 10}, "tests": {"wire": 2}, "fields": {"Server": 22}}
    (tmp_path / "rooms.toml").write_text(rooms.written(zones))
    assert rooms.figures(tmp_path / "rooms.toml") == zones


def test_an_institutions_site_imports_no_code_that_attacks(parts: list[Module]) -> None:
    known = {module.name: module for module in parts}
    needed, imported = {"polyfed.deploy.host"}, set[str]()
    while needed:
        imported |= needed
        needed = {other for name in needed for other in imports(known[name], known, at_once=True)} - imported
    assert "polyfed.engines.site" in imported
    assert not imported & {"polyfed.engines.attackers", "polyfed.federation.attacks"}


def tree(root: Path, **sources: str) -> Path:
    """A package ``polyfed`` with modules by name (``core__a`` is ``core/a.py``, ``public`` the package's own)."""
    for name, source in sources.items():
        path = root / "polyfed" / f"{'__init__' if name == 'public' else name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root / "polyfed"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"core__a": "from polyfed.data.b import x", "data__b": ""}, ["polyfed.core.a -> polyfed.data.b"]),
        ({"core__a": "def f():\n    import polyfed.data.b", "data__b": ""}, ["polyfed.core.a -> polyfed.data.b"]),
        ({"runs__a": "import polyfed.deploy.b", "deploy__b": ""}, ["polyfed.runs.a -> polyfed.deploy.b"]),
        ({"loose": "", "core__a": ""}, ["polyfed.loose stands at the root"]),
        ({"public": "", "data__b": "import polyfed"}, ["polyfed.data.b -> polyfed"]),
        ({"core__a": "", "data__b": "from polyfed.core import a"}, []),
    ],
)
def test_an_upward_import_is_seen(tmp_path: Path, sources: dict[str, str], expected: list[str]) -> None:
    assert upward(modules(tree(tmp_path, **sources))) == expected


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"core__b": "from polyfed.core import a"}, [["polyfed.core.a", "polyfed.core.b"]]),
        ({"core__b": "def f():\n    from polyfed.core import a"}, [["polyfed.core.a", "polyfed.core.b"]]),
        ({"core__b": "if TYPE_CHECKING:\n    from polyfed.core import a"}, [["polyfed.core.a", "polyfed.core.b"]]),
        ({"core__b": "from polyfed.core import c"}, []),
        (
            {"models__a": "from polyfed.optim.b import x", "optim__b": "from polyfed.models import c"},
            [["models", "optim"]],
        ),
    ],
)
def test_a_circle_is_seen(tmp_path: Path, sources: dict[str, str], expected: list[list[str]]) -> None:
    others = {"core__a": "from polyfed.core.b import x", "core__b": "", "core__c": "", "models__c": ""}
    assert cycles(modules(tree(tmp_path, **others | sources))) == expected


CODE = """
class Base(BaseModel):
    one: int
    shared: ClassVar[int] = 1

class Middle(Base, Generic[T]):
    two: int
    _own: int = 0

class Leaf(Middle, Base):
    one: float
    three: Annotated[int, "x"] = 3
"""


def test_fields_of_ancestors_count_once(tmp_path: Path) -> None:
    assert fields("Leaf", classes(modules(tree(tmp_path, public="", core__some=CODE)))) == {"one", "two", "three"}


def test_duplicates_and_wide_classes_are_seen(tmp_path: Path) -> None:
    wide = "class Wide:\n" + "".join(f"    field_{number}: int\n" for number in range(16))
    parts = modules(tree(tmp_path, core__a=wide, core__b=wide.replace("Wide", "Other")))
    assert len(house.duplicates(parts)) == 2
    assert [line.split(": ")[1] for line in house.wide_classes(parts, {"Other": 16})] == ["16 fields, at most 15"]
