"""The two rivals on every runtime, each in processes of its own: start, measure, end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from deployment import POLYFED, Loopback, Programs

from echo import work
from polyfed.core.errors import RunError
from polyfed.deploy.flower_programs import Link, flower_environment, free_port, link_to, program
from polyfed.deploy.folders import ServerFolder, SiteFolder
from polyfed.deploy.init import create_federation
from polyfed.deploy.settings import Connection, ServerAddress, load_settings
from polyfed.runs.experiment import Experiment

WORKERS = 2
_STATUS_EVERY = 10.0

_APP = """[project]
name = "echo-app"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "benchmark"

[tool.flwr.app.components]
serverapp = "echo_server:server"
clientapp = "echo_client:client"

[tool.flwr.app.config]
out = ""
schedule = ""
clients = 0
"""
_MODULES = {
    "echo_server.py": "from echo.flower_server import server_app\n\nserver = server_app()\n",
    "echo_client.py": "from echo import flower_client\n\nclient = flower_client.client\n",
}


@dataclass(frozen=True)
class Leg:
    """Measurements of a rival.

    Attributes:
        rounds: All rounds, in order.
        start: Seconds from its first process to the end of the first exchange, which may wait for others to come up.
    """

    rounds: list[work.Round]
    start: float


Rival = Callable[[Sequence[int]], Leg]
"""Measures rounds of so many bytes each way."""


def experiment(clients: int) -> dict[str, Any]:
    """The echo among clients with next to no data, each a group, so that each can be a site."""
    source = {"name": "scenes", "train": 8, "validation": 0, "test": 0, "columns": {"text": "text"}}
    view = {"name": "tokens", "length": 8, "tokenizer": {"name": "hashing", "size": 64}}
    group = {
        "count": 1,
        "source": "texts",
        "test_split": None,
        "task": {"name": "classification", "target": "topic"},
        "model": {"dim": 4, "encoders": {"text": {"name": "bag", "width": 4, "view": view}}},
    }
    return {
        "name": "echo",
        "data": {"sources": {"texts": {**source, "targets": {"topic": "topic"}}}},
        "clients": {f"client-{k}": group for k in range(clients)},
        "algorithm": {"name": "echo.method.Echo"},
        "run": {"rounds": 1, "threads": 1, "device": "cpu", "evaluate_clients": False, "output": {"plots": False}},
    }


def rivals(engine: str, programs: Programs, clients: int) -> dict[str, Rival]:
    """polyfed and the bare runtime on an engine within one machine."""
    chosen: dict[str, tuple[dict[str, Any], str, int]] = {
        "ray": ({"name": "ray", "workers": WORKERS}, "echo.plain", WORKERS),
        "flower": ({"name": "flower", "nodes": clients}, "echo.flower_server", os.cpu_count() or 1),
    }
    settings, module, processes = chosen[engine]  # as many as the engine makes
    source = programs.folder / f"{engine}.yaml"
    source.write_text(json.dumps(experiment(clients)))  # which is YAML, too
    return {
        "polyfed": partial(_through_polyfed, programs, engine, source, [f"run.engine={json.dumps(settings)}"]),
        "bare": partial(_bare, programs, engine, module, [str(clients), str(processes)]),
    }


def crew(programs: Programs, clients: int, workers: int, pastime: str) -> Rival:
    """polyfed on so many workers of Ray, with clients of a second each, ``busy`` or ``idle``."""
    source = programs.folder / "crew.yaml"
    source.write_text(json.dumps(experiment(clients)))
    settings = json.dumps({"name": "ray", "workers": workers})
    return partial(_through_polyfed, programs, "ray", source, [f"run.engine={settings}", f"algorithm.{pastime}=1.0"])


def rivals_deployed(loopback: Loopback) -> dict[str, Rival]:
    """polyfed over its sites' connections, and the bare runtime over SuperNodes of its own."""
    return {
        "polyfed": partial(_through_polyfed, loopback.programs, "deployment", loopback.experiment, []),
        "bare": partial(_bare_deployed, loopback),
    }


def _through_polyfed(
    programs: Programs, engine: str, source: Path, overrides: Sequence[str], schedule: Sequence[int]
) -> Leg:
    out = Path(tempfile.mkdtemp(prefix=f"{engine}-run-", dir=programs.folder))
    given = [*overrides, f"run.rounds={len(schedule)}", f"algorithm.schedule={json.dumps(list(schedule))}"]
    began = time.time()
    command = [*POLYFED, "run", str(source), "--out", str(out), *(f"--set={text}" for text in given)]
    programs.run(f"{engine}-polyfed", command)
    return _leg(work.rounds_of_run(out), began)


def _bare(programs: Programs, engine: str, module: str, counts: Sequence[str], schedule: Sequence[int]) -> Leg:
    out = programs.folder / f"{engine}-bare.json"
    began = time.time()
    programs.run(f"{engine}-bare", [sys.executable, "-m", module, str(out), _text(schedule), *counts])
    return _leg(work.read_rounds(out), began)


@cache
def _bare_federation(programs: Programs, sites: Sequence[str]) -> ServerFolder:
    """A server as polyfed's, with SuperNodes in place of sites, which run no app."""
    folder, content = programs.folder / "bare", Experiment.load(experiment(len(sites)))
    create_federation(folder, content, ["localhost"], port=free_port(), superlink_port=free_port(), keys=True)
    programs.start("bare-server", [*POLYFED, "deploy", "server", str(folder / "server")])
    programs.wait_for("bare-server", "open for sites")
    for name in sites:
        site = SiteFolder(folder / name)
        command = [program("flower-supernode"), "--superlink", load_settings(Connection, site.connection).server]
        command += ["--root-certificates", str(site.authority), "--auth-supernode-private-key", str(site.key)]
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        variables = flower_environment(site.home).items()
        own = {key: value for key, value in variables if key == "PATH" or key.startswith("FLWR_")}
        programs.start(f"bare-{name}", command, own)
        programs.wait_for(f"bare-{name}", "SuperNode ID")
    return ServerFolder(folder / "server")


def _bare_deployed(loopback: Loopback, schedule: Sequence[int]) -> Leg:
    server = _bare_federation(loopback.programs, loopback.sites)
    link = link_to(server, load_settings(ServerAddress, server.settings))
    out = loopback.programs.folder / "deployment-bare.json"
    began = time.time()
    config = f'out="{out}" schedule="{_text(schedule)}" clients={len(loopback.sites)}'
    run = str(link.call("run", str(_app(loopback.programs.folder)), "--run-config", config)["run-id"])
    asked = time.monotonic()

    def over() -> bool:
        nonlocal asked
        if not out.is_file() and time.monotonic() - asked > _STATUS_EVERY:
            asked = time.monotonic()
            _require_alive(link, run, out)
        return out.is_file()

    loopback.programs.wait("bare-server", over, 3600)
    return _leg(work.read_rounds(out), began)


def _require_alive(link: Link, run: str, out: Path) -> None:
    (listed,) = link.call("list", "--run-id", run)["runs"]
    if str(listed["status"]).startswith("finished") and not out.is_file():
        raise RunError(f"the bare echo failed (status {listed['status']}); see bare-server.log")


def _app(folder: Path) -> Path:
    app = folder / "echo-app"
    app.mkdir()
    (app / "pyproject.toml").write_text(_APP)
    for name, text in _MODULES.items():
        (app / name).write_text(text)
    return app


def _text(schedule: Sequence[int]) -> str:
    return ",".join(map(str, schedule))


def _leg(rounds: list[work.Round], began: float) -> Leg:
    return Leg(rounds, rounds[0].started + rounds[0].seconds - began)
