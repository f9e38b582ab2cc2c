"""The site: its menu has every page, its reference every setting and component, its page of errors every message."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import reference
import site_search
from messages import Message, messages
from polyfed.cli import catalogue
from polyfed.runs.config_files import preset_names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for below in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(below)]


def test_the_menu_has_every_page_once(pages: dict[str, str]) -> None:
    menu = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")}
    of_the_project = {name for name in menu if (ROOT / name).is_file()}
    assert len(menu) == len(set(menu))
    linked = {"decisions.md"}  # not in the menu
    assert set(menu) - of_the_project == written - linked | {f"reference/{name}" for name in pages} | {"index.md"}


def test_every_page_has_a_next_step() -> None:
    link = re.compile(r"\]\((?!https?:)[^)#]+\.md")
    assert [file.name for file in (ROOT / "docs").rglob("*.md") if not link.search(file.read_text())] == []


def test_every_page_begins_with_its_title() -> None:
    """mkdocs takes a page's title from its first line, or else from the file: README.md would be "Index"."""
    texts = site_search.texts()
    assert len(texts) > 70
    assert [name for name, text in texts.items() if not text.startswith("# ")] == []


def later_hits(docs: list[dict[str, Any]]) -> dict[str, int]:
    """Questions without their answer in the first three hits, with its rank."""
    ranks = site_search.hits(docs)
    assert len(ranks) == 30
    return {question: rank for question, rank in ranks.items() if not 1 <= rank <= 3}


def test_the_search_answers_thirty_questions_in_its_first_three_hits() -> None:
    assert later_hits(site_search.documents(site_search.texts())) == {}


def test_every_component_and_setting_is_there(pages: dict[str, str]) -> None:
    for family in catalogue.kinds():
        text = pages[{"presets": "presets.md", "settings": "settings.md"}.get(family, "components.md")]
        for name in catalogue.entries(family):
            assert f"`{name}`" in text
    assert pages["presets.md"].count("\n| `") == len(preset_names())


def test_commands_stand_with_their_arguments(pages: dict[str, str]) -> None:
    of_study_run = pages["commands.md"].partition("## `polyfed study run`")[2].partition("\n## ")[0]
    assert all(f"| `{name}" in of_study_run for name in ("FILE`", "--jobs "))


def test_messages_of_a_module_are_read(tmp_path: Path) -> None:
    (tmp_path / "core.py").write_text(
        "class PolyfedError(Exception): ...\n"
        "class OddError(PolyfedError): ...\n"
        "def check(n):\n"
        '    """Refuse odd numbers."""\n'
        "    if n % 2:\n"
        '        raise OddError(f"{n} is odd" + ("; take 2" if n > 1 else ""))\n'
        "    raise KeyError('not a message to a user')\n"
    )
    assert messages(tmp_path) == [Message("OddError", "‹n› is odd; take 2 | ", "core", "Refuse odd numbers.")]


def test_the_page_of_errors_has_every_message(pages: dict[str, str]) -> None:
    source = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    made = len(re.findall(r"(?<!class )\b(?:Config|Data|Run|Exchange|Payload)Error\(", source))
    every = messages()
    own = [one for one in every if one.error.endswith("Error") and one.error not in reference.OF_ARGUMENTS]
    heads = set(reference.table(("message", "where"), ()))
    rows = [line for line in pages["errors.md"].splitlines() if line.startswith("| ") and line not in heads]
    assert len(own) >= made - 3  # the few that are named but not made: annotations, docstrings
    assert len(rows) == len(every)


@pytest.mark.slow
def test_it_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    """Every warning of mkdocs, such as of a link that leads nowhere, is an error."""
    build = pytest.importorskip("mkdocs.commands.build", reason="the extra docs is not installed")
    from mkdocs.config import load_config

    build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site" / "reference" / "errors.html").is_file()
    scripts = re.findall(r'<script src="([^"]+)"', (tmp_path / "site" / "index.html").read_text())
    assert "assets/iframe-worker.js" in scripts  # search over file://
    assert all((tmp_path / "site" / name).is_file() for name in scripts), "the site uses no other host"
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    assert later_hits(index["docs"]) == {}
    titles = {re.findall("<title>(.*?)</title>", page.read_text())[0] for page in (tmp_path / "site").rglob("*.html")}
    assert not any(title.startswith("Index") for title in titles)
