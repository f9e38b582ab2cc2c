"""Files of a federation: which there are, where they lie, and secrets that only their owner can read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.core.files import sync_folder

SECRET_MODE = 0o600


class ServerFolder:
    """Paths in the folder of the federation's server.

    Attributes:
        path: the folder.
        settings: hosts and ports.
        experiment: what ``polyfed run`` trains over the sites.
        authority: certificate and private key of the federation's certificate authority.
        identity: certificate and private key of the server.
        secret: what SuperLink wants of whoever admits sites or starts runs; beside the certificate of the authority.
        gate: configuration of the proxy in front of SuperLink.
        sites: folder of the public keys of admitted sites: ``<name>.pub``.
        home: Flower's own folder, with the connection that its command line uses.
        logs: access log of the gate and log of SuperLink.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.experiment = path / "server.yaml", path / "experiment.yaml"
        self.authority = path / "ca.crt", path / "ca.key"
        self.identity = path / "server.crt", path / "server.key"
        self.secret = path / "control.secret"
        self.gate, self.sites = path / "Caddyfile", path / "sites"
        self.home, self.logs = path / "flower", path / "logs"


class SiteFolder:
    """Paths in the folder of a site.

    Attributes:
        path: the folder.
        config: what the site decides: where its data lie, and what it allows.
        agreed: what all agreed upon, which ``config`` extends: sources, public set, its clients and their models.
        connection: where the server is and how it is reached.
        plan: what is to be run, as the server's operator wrote it down.
        roster: sites whose keys this one believes, and their clients.
        authority: certificate of the authority that signed the server's certificate.
        key: private key of the site; it never leaves the folder.
        public_key: what the server's operator is given.
        home: Flower's own folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.agreed = path / "site.yaml", path / "agreed.yaml"
        self.connection = path / "connection.yaml"
        self.plan, self.roster = path / "plan.yaml", path / "roster.yaml"
        self.authority = path / "ca.crt"
        self.key, self.public_key = path / "node.key", path / "node.pub"
        self.home = path / "flower"


def write_new(path: Path, content: str | bytes, *, secret: bool = False) -> Path:
    """Write a file that must not be there yet, and flush it to disk; a secret is its owner's alone from the start.

    Raises:
        RunError: it is there, or the folder cannot be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder '{path.parent}': {error.strerror}") from error
    try:
        # with O_EXCL, for which a link is a file too, nobody can have the secret written where they read it
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE if secret else 0o644)
    except FileExistsError as error:
        raise RunError(f"'{path}' is there already; move it away if it is to be made anew") from error
    except OSError as error:
        raise RunError(f"cannot write '{path}': {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunError(f"cannot write '{path}': {error.strerror}") from error
    return path


def is_private(path: Path) -> bool:
    return not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def require_file(path: Path, purpose: str) -> Path:
    """The path, if it is a file.

    Raises:
        RunError: it is not; ``purpose`` says what it is for and where it comes from.
    """
    if not path.is_file():
        raise RunError(f"'{path}' is missing: {purpose}")
    return path
