"""The short form of the guide: a server and its sites as real processes train on loopback, and nothing else gets in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import federations
import pytest
import yaml

import polyfed
from polyfed import Experiment, run
from polyfed.runs.records import RunRecords
from small_federations import adapted, federation_for, named


def exchanged(folder: Path) -> list[dict[str, Any]]:
    """The ledger without what is not of one desk: the question of a server which knows no architectures at the start,
    and signatures of keys of masked sums, by which sites know each other."""
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    signed = {("mask_keys", "framing"), ("mask_shares", "framing")}
    kept = [line for line in lines if line["step"] != "setup:initial" and line["bundle"] != "mask_signatures"]
    return [line for line in kept if (line["step"], line["bundle"]) not in signed]


def status(folders: federations.Folders, path: str) -> int:
    trusted = ssl.create_default_context(cafile=str(folders.server.authority[0]))
    request = urllib.request.Request(f"https://localhost:{folders.address.port}{path}", data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, context=trusted, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def train(live: federations.Live, sites: list[str], out: Path) -> None:
    """Start these sites, and run the experiment with them."""
    folders, environment = live.folders, live.environment | {"POLYFED_CACHE": str(out.parent / "cache")}
    with ExitStack() as stack:
        for name in sites:
            log = out.parent / f"{name}.log"
            stack.enter_context(federations.started("site", str(folders.path / name), log=log, environment=environment))
        arguments = ["--out", str(out), "--set", f"run.engine.sites={json.dumps(sites)}"]
        federations.completed(live.process, "run", str(folders.server.experiment), *arguments, environment=environment)
        assert status(folders, "/v1/control/register-node") == 404
        assert status(folders, "/v1/control/start-run") == 404
        assert status(folders, "/v1/fleet/pull-messages") not in (200, 404)  # there, and closed without a key


def in_one_process(settings: dict[str, Any], folder: Path) -> Path:
    settings["data"]["cache_dir"] = str(folder.parent / "cache")
    return run(Experiment.parse(settings), folder).folder


@pytest.mark.slow
@pytest.mark.parametrize("sites", [["hospital"], ["archive", "hospital"]], ids=["one", "all"])
def test_sites_train_as_in_one_process_and_the_gate_is_closed_to_all_else(tmp_path: Path, sites: list[str]) -> None:
    with federations.served(federations.make(tmp_path / "federation"), tmp_path) as live:
        train(live, sites, tmp_path / "run")
    alone = federations.experiment_settings()
    alone["clients"] = {name: alone["clients"][name] for name in sites}
    expected = in_one_process(alone, tmp_path / "alone")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert exchanged(tmp_path / "run") == exchanged(expected)
    records = RunRecords.load(tmp_path / "run")
    assert records.clients == (*(name for name in sites if name == "archive"), "hospital-0", "hospital-1")
    assert not records.events
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [adapted(name="ffa_lora"), named(name="promptfl")], ids=["adapters", "prompts"])
def test_sites_that_adapt_their_own_network_train_as_in_one_process(tmp_path: Path, settings: dict[str, Any]) -> None:
    folders = federations.make(tmp_path / "federation", settings=settings)
    for name in settings["clients"]:
        shutil.copytree(settings["data"]["weights_dir"], folders.site(name).path / "weights", dirs_exist_ok=True)
    with federations.served(folders, tmp_path) as live:
        train(live, [*settings["clients"]], tmp_path / "run")
    expected = in_one_process(settings, tmp_path / "alone")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert exchanged(tmp_path / "run") == exchanged(expected)
    assert not RunRecords.load(tmp_path / "run").events


def guide() -> Any:
    """The experiment of the guide to masked sums and noise, of sites with one secret, so that noise is equal."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "masked-sums-at-sites.md").read_text(encoding="utf-8")
    written = yaml.safe_load(page.partition("<<'END'\n")[2].partition("END\n")[0])
    return yaml.safe_load(Experiment.parse(written).to_yaml())  # with clients for sites


@pytest.mark.slow
@pytest.mark.parametrize("settings", [guide(), federation_for("creamfl")], ids=["masks and noise", "creamfl"])
def test_sites_give_the_records_of_a_run_in_one_process(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The cost of privacy and the names of models are equal as well."""
    pytest.importorskip("opacus", reason="opacus is not installed")
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    folders, secret = federations.make(tmp_path / "federation", settings=settings), tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    for name in settings["clients"]:
        path = folders.site(name).config
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"secret": str(secret)}))
    with federations.served(folders, tmp_path) as live:
        train(live, [*settings["clients"]], tmp_path / "run")
    if "privacy" in settings:
        settings["privacy"]["secret"] = str(secret)
    expected = in_one_process(settings, tmp_path / "alone")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert exchanged(tmp_path / "run") == exchanged(expected)
    assert federations.models(expected)
    assert federations.models(tmp_path / "run") == federations.models(expected)
    assert federations.spent(folders.path) == federations.spent(expected)
    records = polyfed.open_run(tmp_path / "run").records
    reported = {name for name in ("server", *records.clients) if "epsilon" in records.last(name, "privacy")}
    assert reported == ({"server", *settings["clients"]} if "privacy" in settings else set())
    report = (tmp_path / "run" / "report.html").read_text()
    assert ("no client gave away more than epsilon" in report) == ("privacy" in settings)


@pytest.mark.slow
@pytest.mark.parametrize("replies", [1, 2])
def test_sites_that_are_not_waited_for_train(tmp_path: Path, replies: int) -> None:
    settings = federations.experiment_settings()
    settings["run"] |= {"rounds": 6, "pace": {"name": "buffered", "replies": replies}}
    with federations.served(federations.make(tmp_path / "federation", settings=settings), tmp_path) as live:
        train(live, ["archive", "hospital"], tmp_path / "run")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    steps = [line for line in map(json.loads, metrics.splitlines()) if line["kind"] == "pace"]
    assert [line["round"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert any(line["metrics"]["staleness"] > 0 for line in steps)
    assert not RunRecords.load(tmp_path / "run").events


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_another_folder_to_the_same_bits(tmp_path: Path) -> None:
    """Certificate and cache lie below the folder in which it was begun, and are named from there."""
    settings = federations.experiment_settings()
    settings["run"]["rounds"] = 6
    settings["data"]["cache_dir"] = str(tmp_path / "federation" / "cache")
    folders = federations.make(tmp_path / "federation", settings=settings)
    out = folders.path / "run"
    with federations.served(folders, tmp_path) as live, ExitStack() as stack:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | live.environment
        for name in settings["clients"]:
            site = str(folders.site(name).path)
            log = tmp_path / f"{name}.log"
            stack.enter_context(federations.started("site", site, log=log, environment=live.environment))
        command = [*federations.CLI, "run", "server/experiment.yaml", "--out", "run"]
        command += ["--set", "run.engine.absence=120"]
        with (tmp_path / "first.log").open("wb") as log:
            first = subprocess.Popen(command, cwd=folders.path, env=environment, stdout=log, stderr=log)
        federations.wait_until((out / "checkpoints/round-000002.json").exists, 120, (tmp_path / "first.log").read_text)
        first.kill()
        first.wait()
        for pid, line in federations.marked_processes(live.environment[federations.MARK]).items():
            if "serverapp" in line or "deploy.connection" in line:  # the first would go on without its launcher
                os.kill(pid, signal.SIGKILL)
        assert not (out / "report.html").exists()
        federations.completed(live.process, "resume", str(out), environment=environment, cwd=Path("/"))
    expected = in_one_process(settings, tmp_path / "alone")
    assert (out / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert exchanged(out) == exchanged(expected)
    assert str(tmp_path) not in (out / "config.yaml").read_text()
    assert [event.incident for event in RunRecords.load(out).events] == ["resumed"]
