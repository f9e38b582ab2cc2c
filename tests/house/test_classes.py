"""Ancestry and fields of classes, and private names in tests, as ``make house`` counts them."""

from __future__ import annotations

from pathlib import Path

from classes import ancestors, classes, fields
from imports import modules
from privates import reached_privates

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


def test_ancestors_and_fields_count_once(tmp_path: Path) -> None:
    package = tmp_path / "polyfed"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "some.py").write_text(CODE)
    known = classes(modules(package))
    assert ancestors("Leaf", known) == ["Middle", "Base"]
    assert fields("Leaf", known) == {"one", "two", "three"}
    assert ancestors("Base", known) == []


TESTS = """
from polyfed.some import _known, public
from elsewhere import _known

def test(monkeypatch, thing):
    assert thing._kept == thing._replace(a=1) == thing.__dict__ == thing._sheet_
    monkeypatch.setattr("polyfed.some._known", public)
    monkeypatch.setattr(thing, "_kept", public)

class Own:
    def count(self):
        return self._kept
"""


def test_private_names_that_tests_reach_are_those_of_the_package(tmp_path: Path) -> None:
    for name, code in (("polyfed", "_known = 1\nclass A:\n    def b(self):\n        self._kept = 1"), ("tests", TESTS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "some.py").write_text(code)
    found = reached_privates(modules(tmp_path / "tests"), modules(tmp_path / "polyfed"))
    assert sorted(place.partition(":")[2] for place in found) == ["2 _known", "6 _kept", "7 _known", "8 _kept"]
