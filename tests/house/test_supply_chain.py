"""Downloads of CI and images are pinned: actions by commit, images by digest, each package from one index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FETCHING = [*WORKFLOWS, *(ROOT / "containers").iterdir(), ROOT / "Makefile", ROOT / ".pre-commit-config.yaml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (.+)", path.read_text())
    assert used
    assert not [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", action)]


@pytest.mark.parametrize("path", FETCHING, ids=lambda path: path.name)
def test_each_package_comes_from_one_index(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"extra.index.url|find.links", text, re.IGNORECASE)
    assert not re.search(r"https?://[\w.-]*(pypi|pytorch|pythonhosted|download)", text)


def test_images_are_pinned_by_digest() -> None:
    lines = (ROOT / "containers" / "Containerfile").read_text().splitlines()
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"${PYTHON_IMAGE}"}
    assert "ARG PYTHON_IMAGE" in lines, "no default: a tag may become another image"


def test_every_package_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)]
