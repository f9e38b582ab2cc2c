"""Federations in temporary folders."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from federations import MARK, marked, started, wait_until
from folders import Folders, Live, make


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
    """A federation that is served, all its processes marked; when it has been stopped nothing of it is left."""
    folder = tmp_path_factory.mktemp("live")
    folders = make(folder / "federation")
    mark = uuid.uuid4().hex
    environment = {MARK: mark}
    with started("server", str(folders.server.path), log=folder / "server.log", environment=environment) as process:
        process.wait_for("open for sites")
        yield Live(folders, process, environment, folder)
    wait_until(lambda: not marked(mark), 10, lambda: f"left: {marked(mark)}")
