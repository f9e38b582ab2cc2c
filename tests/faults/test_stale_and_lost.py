"""Servers that were restored from an old copy, and sites that have lost what they kept: named on both sides."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_grid import Rule, dies_before
from federations_in_process import InProcess
from struck_runs import events, reasons, results

from polyfed.core.errors import ExchangeError
from polyfed.runs.folder import RunFolder

pytestmark = pytest.mark.slow  # make test-engines; the other modules here stand for them in make test


@pytest.fixture(autouse=True)
def _told(federation: InProcess) -> None:
    """Sites send the texts of their errors."""
    for site in ("paired", "image"):
        federation.edit(site, {"tracebacks": True})


def stopped(federation: InProcess, out: Path, number: int) -> None:
    """A run that stops in a round for want of clients."""
    federation.grid.rules = [Rule(dies_before, client="paired-0", round=number, times=3)]
    with pytest.raises(ExchangeError):
        federation.run(out, rounds=6, exchange={"min_clients": 3})
    federation.restart("paired", "image")


@pytest.fixture
def old(federation: InProcess, tmp_path: Path) -> Path:
    """A copy of a run folder after round 1; since then the run has come to its end, round 6."""
    stopped(federation, tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    federation.resume(tmp_path / "run")
    federation.restart("paired", "image")
    return tmp_path / "old"


def test_old_copies_are_refused_harmlessly(federation: InProcess, old: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    before = {path: path.read_bytes() for path in federation.folder.glob("*/state/**/*.safetensors")}
    assert len(before) > 6
    reported = (
        r"image: RunError: state of client 'image' after round 1, phase 0 is not here; "
        r"there are newer ones \(rounds 4, 5, 6\): the server is stale, restored from an old copy of its run"
    )
    with pytest.raises(ExchangeError, match=reported):
        federation.resume(old)
    at_the_site = [one.getMessage() for one in caplog.records if one.name == "polyfed.deploy.engines.flower_node"]
    assert any("client image failed" in line and "the server is stale" in line for line in at_the_site)
    assert {path: path.read_bytes() for path in federation.folder.glob("*/state/**/*.safetensors")} == before


def test_a_copy_that_is_a_round_old_is_resumed_to_the_same_bits(federation: InProcess, tmp_path: Path) -> None:
    """The sites have gone on for a round since; they kept what the copy asks for."""
    undisturbed_run = results(federation.run(tmp_path / "whole", rounds=6, exchange={"min_clients": 3}).folder)
    stopped(federation, tmp_path / "run", 3)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    federation.grid.rules = [Rule(dies_before, client="paired-0", round=4, times=3)]
    with pytest.raises(ExchangeError, match="round 4"):
        federation.resume(tmp_path / "run")
    federation.restart("paired", "image")
    assert results(federation.resume(tmp_path / "old").folder) == undisturbed_run


def test_a_site_that_lost_its_folder_is_left_out_with_the_remedy(federation: InProcess, tmp_path: Path) -> None:
    stopped(federation, tmp_path / "run", 3)
    shutil.rmtree(federation.states("image", "image").parent)
    folder = resumed(federation, tmp_path)
    assert reasons(folder)["image"] == (
        "RunError: state of client 'image' after round 2, phase 0 is not here; there is none of this run: it was lost, "
        "or the run is foreign to this folder; restore the folder"
    )
    assert {participant for _, participant, event in events(folder) if event == "client_excluded"} == {"image"}


def test_a_state_that_is_damaged_is_named(federation: InProcess, tmp_path: Path) -> None:
    stopped(federation, tmp_path / "run", 3)
    path = federation.states("image", "image") / "000002-00.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert "is damaged: 000002-00.safetensors" in reasons(resumed(federation, tmp_path))["image"]


def test_a_folder_that_was_restored_is_good_again(federation: InProcess, tmp_path: Path) -> None:
    undisturbed_run = results(federation.run(tmp_path / "whole", rounds=6, exchange={"min_clients": 3}).folder)
    stopped(federation, tmp_path / "run", 3)
    place = federation.states("image", "image").parents[1]
    shutil.move(place, tmp_path / "copy")
    with pytest.raises(ExchangeError, match="there is none of this run"):
        federation.resume(tmp_path / "run")
    shutil.rmtree(place)
    shutil.move(tmp_path / "copy", place)
    federation.restart("image")
    assert results(federation.resume(tmp_path / "run").folder) == undisturbed_run


def resumed(federation: InProcess, tmp_path: Path) -> Path:
    """The run of ``stopped`` goes on to its end without the client called image."""
    folder = RunFolder(tmp_path / "run")
    config = folder.path / "config.yaml"
    assert "min_clients: 3" in config.read_text()
    config.write_text(config.read_text().replace("min_clients: 3", "min_clients: 2"))
    marks = {"run": folder.identity, "salt": folder.salt, "config": folder.config_digest()}
    folder.write("run.json", json.dumps(marks))
    return federation.resume(tmp_path / "run").folder


def test_a_resumed_run_names_the_refusal_of_a_site(federation: InProcess, tmp_path: Path) -> None:
    """A site that refuses at a resume is not merely away."""
    stopped(federation, tmp_path / "run", 2)
    federation.edit("image", {"public": {"source": "scenes", "items": 15}})
    federation.restart("image")
    with pytest.raises(ExchangeError, match=r"image cannot take part: DataError: error \w+ in the site's log"):
        federation.resume(tmp_path / "run")
