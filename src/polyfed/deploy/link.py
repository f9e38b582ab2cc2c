"""Flower's command line, pointed at one SuperLink."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from polyfed.core.errors import RunError
from polyfed.deploy.flower import flower_environment, program

CONNECTION = "polyfed"
"""Name of the connection in the Flower home of a link."""

_TIMEOUT = 120.0


class Link:
    """Calls ``flwr`` with a home of its own, in which the SuperLink is the one connection.

    Args:
        home: folder for Flower's files; made if it is not there.
        address: host:port of the SuperLink.
        root_certificates: certificate of the authority that signed the SuperLink's; None: no TLS, for loopback only.

    Raises:
        RunError: the folder cannot be written to.
    """

    def __init__(self, home: Path, address: str, root_certificates: Path | None) -> None:
        self.home = home
        self.address = address
        security = (
            "insecure = true"
            if root_certificates is None
            else f"root-certificates = {json.dumps(str(root_certificates.resolve()))}"
        )
        text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{security}\n'
        try:
            home.mkdir(parents=True, exist_ok=True)
            (home / "config.toml").write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write '{home}': {error.strerror}") from error

    def call(self, *arguments: str) -> dict[str, Any]:
        """What a command of ``flwr`` answers, as JSON.

        Raises:
            RunError: it failed, or got no answer.
        """
        command = [program("flwr"), *arguments, "--format", "json"]
        shown = f"flwr {' '.join(arguments[:2])} at {self.address}"
        try:
            found = subprocess.run(
                command,
                env=flower_environment(self.home),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            answer = json.loads(found.stdout)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{shown} got no answer within {_TIMEOUT:g} s") from error
        except ValueError:
            answer = {"error-message": (found.stdout + found.stderr).strip()}
        if found.returncode or not answer.get("success"):
            reason = " ".join(str(answer.get("error-message", "")).split())
            raise RunError(f"{shown} failed: {reason or f'exit code {found.returncode}'}")
        return dict(answer)
