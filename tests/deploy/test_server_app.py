"""The server half of a deployed run leaves its outcome for the launcher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from misbehaving import raising
from polyfed.core.errors import RunError
from polyfed.deploy import launch
from polyfed.deploy.launch import Launch, ServedOutcome
from polyfed.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("error", "reported", "mendable"),
    [
        (KeyboardInterrupt(), "the run was stopped at SuperLink; all complete rounds are safe: start the server", True),
        (SystemExit(1), "the run was stopped at SuperLink", True),
        (RunError("too few clients"), "too few clients", True),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero", False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_end_is_recorded_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, reported: str, mendable: bool
) -> None:
    monkeypatch.setattr(launch, "resume", raising(error))
    (tmp_path / "run").mkdir()
    Launch(str(tmp_path / "run"), resume=True).write(tmp_path)
    with pytest.raises(type(error)):
        launch.server_app()(None, SimpleNamespace(run_config={"launch": tmp_path}))
    outcome = ServedOutcome.read(tmp_path)
    assert outcome is not None
    assert outcome.error.startswith(reported)
    assert outcome.mendable == mendable


def test_what_a_killed_launch_has_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "run").mkdir()
    folders = {name: tmp_path / f"polyfed-launch-{name}" for name in ("killed", "followed", "served", "starting")}
    for name, folder in folders.items():
        folder.mkdir()
        Launch(str(tmp_path / ("run" if name == "served" else "other")), resume=False).write(folder)
        if name != "starting":  # whose lock is not there yet
            (folder / ".lock").touch()
    with RunFolder(folders["followed"]).lock(), RunFolder(tmp_path / "run").lock():
        launch._clear_abandoned()
    assert [name for name, folder in folders.items() if folder.exists()] == ["followed", "served", "starting"]
