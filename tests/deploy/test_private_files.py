"""Whatever polyfed's programs write is their user's alone, whatever the user's own umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from federations import Folders

from polyfed.cli.main import main
from polyfed.core.files import private_files


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The usual umask: others may read."""
    before = os.umask(0o022)
    yield
    assert os.umask(before) == 0o022, "a program left another umask"


def others_can_read(folder: Path, before: set[Path]) -> dict[str, str]:
    """New files of a folder that others can read, with their modes."""
    new = [path for path in folder.rglob("*") if path not in before and not path.is_symlink()]
    assert new
    modes = {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in new}
    return {name: oct(mode) for name, mode in modes.items() if mode & (stat.S_IRWXG | stat.S_IRWXO)}


def test_the_check_of_a_site_leaves_no_image_that_others_can_read(
    fresh: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYFED_CACHE", raising=False)
    site = fresh.site("hospital").path
    before = set(site.rglob("*"))
    assert main(["deploy", "check", str(site), "--no-network"]) == 0
    assert list((site / "cache").rglob("*.npy"))
    assert others_can_read(site, before) == {}


def test_a_run_and_its_evaluation_leave_nothing_that_others_can_read(
    tiny: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))  # a new one, as what it writes is looked at
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    assert main(["run", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "run"), "--set", "run.rounds=1"]) == 0
    assert others_can_read(tmp_path / "run", set()) == {}
    assert others_can_read(tmp_path / "cache", set()) == {}


def test_the_umask_is_as_before_after_an_error(tmp_path: Path) -> None:
    assert main(["run", str(tmp_path / "nothing.yaml")]) == 2
    with pytest.raises(ZeroDivisionError), private_files():
        raise ZeroDivisionError
