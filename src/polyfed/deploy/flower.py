"""Flower's programs: their command lines and their environment.

Only Flower's command line is used, which is its public face; see the pinned range of the extra ``deploy``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.deploy.authentication import VARIABLE
from polyfed.deploy.connection import Connection, ServerAddress
from polyfed.deploy.files import ServerFolder, SiteFolder
from polyfed.engines.quiet import QUIET, SPEED

_SETTINGS = {
    **QUIET,
    **SPEED,
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; Flower's own 1 is a second more for every message
    "TOKENIZERS_PARALLELISM": "false",
}


def flower_environment(home: Path) -> dict[str, str]:
    """This process's environment for a program of Flower: nothing is reported or installed, and ``home`` is its own."""
    scripts = sysconfig.get_path("scripts")  # Flower starts its own programs by bare name
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost"]))
    own = {"FLWR_HOME": str(home.resolve()), "PATH": path, "PYTHONUNBUFFERED": "1"}
    return os.environ | _SETTINGS | own | {"NO_PROXY": direct, "no_proxy": direct}


def shown_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The command as one would type it, with the variables that matter."""
    names = (
        "FLWR_HOME",
        *(name for name in _SETTINGS if name.startswith("FLWR_")),
        *({VARIABLE} & environment.keys()),
    )
    return shlex.join(["env", *(f"{name}={environment[name]}" for name in names), *command])


def program(name: str) -> str:
    """Path of a program of Flower, beside this Python or on PATH.

    Raises:
        RunError: Flower is not installed.
    """
    found = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if found is None:
        raise RunError(f"the program '{name}' is missing; install it with: pip install 'polyfed[deploy]'")
    return found


def superlink_command(folder: ServerFolder, address: ServerAddress) -> list[str]:
    """The command that serves a federation.

    Its state is in memory: tensors through its database fail under load, and what must last is in the run folder.
    """
    certificate, key = folder.identity
    return [
        program("flower-superlink"),
        *("--host", "127.0.0.1", "--port", str(address.superlink_port)),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(folder.authority[0])),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
    ]


def supernode_command(folder: SiteFolder, connection: Connection, port: int) -> list[str]:
    """The command that connects a site; ``port`` is a free one on 127.0.0.1, for the site's own processes."""
    config = str(folder.config.resolve())
    if '"' in config or "\\" in config:
        raise RunError(f"the folder of the site must not have quotes or backslashes in its path: {config}")
    return [
        program("flower-supernode"),
        *("--superlink", connection.server, "--root-certificates", str(folder.authority)),
        *("--auth-supernode-private-key", str(folder.key)),
        *("--node-config", f'config="{config}"'),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
