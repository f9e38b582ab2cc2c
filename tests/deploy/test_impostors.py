"""Real processes: an impostor with an admitted key and another site's file gets nothing, and is named."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from federations import CLI, Folders, Live, Started, started, wait_until

from polyfed.deploy.folders import create_keys, fingerprint, read_public
from polyfed.deploy.init import admit_site
from polyfed.runs.records import SITE_REFUSED, RunRecords

pytestmark = pytest.mark.slow


def impostor(folders: Folders, name: str) -> tuple[Path, str]:
    """A site of its own key, admitted by its own name, with the file of the hospital; its folder and key."""
    folder = folders.path / name / "hospital"
    own = shutil.ignore_patterns("node.*", "state", "flower", "cache")
    shutil.copytree(folders.path / "hospital", folder, ignore=own)
    public = create_keys(folder)
    admit_site(folders.server.path, name, public)
    return folder, fingerprint(read_public(public))


def test_impostors_get_nothing_and_are_named(live: Live, tmp_path: Path) -> None:
    """One that is there before the hospital, and one that comes in mid-run, while the hospital is away."""
    environment = live.environment | {"POLYFED_CACHE": str(tmp_path / "cache")}
    out = tmp_path / "run"
    for site in ("hospital", "archive"):  # which agreed on one round
        plan = live.folders.path / site / "plan.yaml"
        plan.write_text(plan.read_text().replace("rounds: 1\n", "rounds: 3\n"))

    with ExitStack() as stack:

        def attended(folder: Path, log: str) -> Started:
            running = started("site", str(folder), log=tmp_path / f"{log}.log", environment=environment)
            return stack.enter_context(running)

        early, early_key = impostor(live.folders, "clinic")
        live.process.wait_for("admitted: clinic")
        attended(early, "early").wait_for("connected to")
        command = [*CLI, "run", str(live.folders.server.experiment), "--out", str(out), "--set", "run.rounds=3"]
        run = Started(command, tmp_path / "run.log", environment)
        stack.callback(run.stop)
        attended(live.folders.path / "archive", "archive")
        hospital = attended(live.folders.path / "hospital", "hospital")
        wait_until(lambda: (out / "timing.jsonl").is_file(), 200, lambda: run.output + live.process.output)
        late, late_key = impostor(live.folders, "spa")
        hospital.stop()
        attended(late, "late").wait_for("connected to")
        attended(live.folders.path / "hospital", "hospital-again")
        assert run.process.wait(300) == 0, run.output
    reported = {(e.participant, e.reason) for e in RunRecords.load(out).events if e.incident == SITE_REFUSED}
    sent_nothing = "it is connected and not among run.engine.sites; it is sent nothing"
    assert reported == {("clinic", f"{sent_nothing} (key {early_key})"), ("spa", f"{sent_nothing} (key {late_key})")}
    for folder in (early, late):
        assert not (folder / "state").exists()
        assert not (folder / "cache").exists()
    for report in ("report.md", "report.html"):
        assert early_key in (out / report).read_text()
    assert "site refused: clinic" in run.output  # the launcher shows it as it happens
