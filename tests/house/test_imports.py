"""Imports run downwards only, in no circles, and nothing stands at the root; what reads them sees it if not."""

from __future__ import annotations

from pathlib import Path

import pytest

from imports import Module, cycles, imports, modules, upward


@pytest.fixture(scope="module")
def parts() -> list[Module]:
    """All modules of polyfed."""
    return modules(Path(__file__).parents[2] / "src" / "polyfed")


def test_imports_run_downwards(parts: list[Module]) -> None:
    assert upward(parts) == []


def test_no_modules_or_packages_import_each_other(parts: list[Module]) -> None:
    assert cycles(parts) == []


def test_an_institutions_site_imports_no_code_that_attacks(parts: list[Module]) -> None:
    known = {module.name: module for module in parts}
    needed, found = {"polyfed.deploy.host"}, set[str]()
    while needed:
        found |= needed
        needed = {other for name in needed for other in imports(known[name], known, at_once=True)} - found
    assert "polyfed.engines.site" in found
    assert not found & {
        "polyfed.engines.attacking",
        "polyfed.engines.colluding",
        "polyfed.federation.attacks",
        "polyfed.federation.false_replies",
    }


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
        (
            {"core__a": "from polyfed.core.b import x", "core__b": "from polyfed.core import a"},
            [["polyfed.core.a", "polyfed.core.b"]],
        ),
        ({"core__a": "def f():\n    from polyfed.core.b import x", "core__b": "from polyfed.core import a"}, []),
        (
            {"models__a": "from polyfed.optim.b import x", "optim__b": "def f():\n    from polyfed.models import a"},
            [["models", "optim"]],
        ),
    ],
)
def test_a_circle_is_seen(tmp_path: Path, sources: dict[str, str], expected: list[list[str]]) -> None:
    assert cycles(modules(tree(tmp_path, **sources))) == expected
