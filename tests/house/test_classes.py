"""Ancestry and fields of classes, as ``make house`` counts them."""

from __future__ import annotations

from pathlib import Path

from classes import ancestors, classes, fields
from imports import modules

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
