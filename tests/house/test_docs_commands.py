"""Commands of the documentation: what a page has one run loads, with its settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from paper_studies import STUDIES
from polyfed.runs.config_files import preset_names
from polyfed.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
OPTIONS = {"--seed": "run.seed=", "--rounds": "run.rounds=", "--engine": "run.engine.name=", "--twin": "twin.kind="}
OPTIONS["--set"] = ""


def commands() -> Iterator[tuple[str, str]]:
    """Place and text of each ``polyfed run`` in fenced and indented code."""
    for page in PAGES:
        fenced = False
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            fenced ^= line.lstrip().startswith("```")
            if match := re.search(r"(?:^|\s)(polyfed run .*)", line if fenced or line.startswith("    ") else ""):
                yield f"{page.name}:{number}", match[1]


def of_presets() -> Iterator[tuple[str, str, list[str]]]:
    """Place, preset and overrides of each command that runs a preset."""
    known = set(preset_names())
    for place, text in commands():
        _, _, source, *words = shlex.split(text, comments=True)
        if source in known:
            pairs = [(OPTIONS.get(option), value) for option, value in pairwise(words)]
            yield place, source, [f"{key}{value}" for key, value in pairs if key is not None]


def test_the_commands_are_seen() -> None:
    places = {place.partition(":")[0] for place, _, _ in of_presets()}
    assert {"compare-runs.md", "ten-minutes.md", "fedaid.md", "fedcola.md", "vqa.md"} <= places


@pytest.mark.parametrize(("place", "preset", "settings"), list(of_presets()))
def test_what_a_page_has_one_run_loads(
    monkeypatch: pytest.MonkeyPatch, place: str, preset: str, settings: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    Experiment.load(preset, settings)


def test_the_studies_that_pages_have_one_run_are_there() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {*re.findall(r"polyfed study run papers/([a-z0-9/-]+)\.yaml", text)}
    assert {"polyfed/demo", "fedaid/t1"} <= named
    assert named <= STUDIES.keys()


@pytest.mark.parametrize("file", sorted((ROOT / "docs" / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_loads(file: Path) -> None:
    Experiment.load(str(file))
