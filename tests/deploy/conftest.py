"""Federations in temporary folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import Folders, Live, make, served


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A federation of two sites with keys; not to be changed."""
    return make(tmp_path_factory.mktemp("made") / "federation")


@pytest.fixture
def fresh(tmp_path: Path) -> Folders:
    """A federation of one's own."""
    return make(tmp_path / "federation")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    with served(make(folder / "federation"), folder) as live:
        yield live
