"""Pages on what leaves a site: table and sentence follow the code's declarations, figures stand on the linked pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import protections
from polyfed.algorithms.algorithm import Algorithm
from polyfed.deploy.settings import ProtectionDemands
from polyfed.wire.schema import steps_of

PAGE = protections.PAGE.read_text(encoding="utf-8")
ROWS = {cells[0].strip("`"): cells for cells in protections.rows()}


@pytest.mark.parametrize("path", protections.PAGES, ids=lambda path: path.stem)
def test_the_table_and_the_facts_of_joining_are_those_of_the_code(path: Path) -> None:
    assert protections.page(path) == path.read_text(encoding="utf-8"), "python scripts/protections.py"
    assert all(word in protections.joining() for word in ("batch", "**number of training samples**", "group", "digest"))


@pytest.mark.parametrize("name", sorted(Algorithm.available()))
def test_every_field_that_a_method_declares_is_in_its_line(name: str) -> None:
    method: Any = Algorithm.available()[name]
    if not method.asks_clients:
        assert name not in ROWS
        return
    assert f"| `{name}` |" in PAGE
    schemas = [schema for schema in steps_of(method).values() if schema.kind == "step"]
    words = {field: str(declared) for schema in schemas for field, declared in schema.returns.items()}
    for field, declared in words.items():
        shown = "number of samples" if field == "num_examples" else f"`{field}`"
        bundles = [word for bundle, word in protections.WORDS.items() if bundle.__name__ in declared]
        assert all(word in ROWS[name][1] for word in bundles or [shown]), (field, ROWS[name])
    assert ("losses" in ROWS[name][1]) == any(schema.others is not None for schema in schemas)
    if not words and "losses" not in ROWS[name][1]:
        assert ROWS[name][1:] == ("nothing", "", "", "", "")


def test_figures_are_those_of_the_pages_that_are_linked() -> None:
    lines = re.findall(r"^\| \[.+?\]\(([\w-]+\.md)\) \|.*\|.*\|.*\| (.+?) \|.*\|$", PAGE, re.M)
    assert [target for target, _ in lines] == ["secure-aggregation.md", "privacy.md", "privacy.md", "robustness.md"]
    for target, cost in lines:
        page = (protections.PAGE.parent / target).read_text(encoding="utf-8")
        figures = re.findall(r"\d+\.\d+", cost)
        assert figures
        assert [figure for figure in figures if figure not in page and f"{figure}0" not in page] == []


def test_the_demands_on_the_page_are_valid_and_all_there_are() -> None:
    import yaml

    (block,) = re.findall(r"```yaml\n(    demands:.*?)    ```", PAGE, re.S)
    demands = yaml.safe_load(block)["demands"]
    ProtectionDemands.model_validate(demands)
    assert set(ProtectionDemands.model_fields) - set(demands) == {"logits"}
    assert all(f" {key}" in block for key in ProtectionDemands.model_fields)
