"""Files of a federation: which there are, where they lie, and secrets that only their owner can read."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from polyfed.core.errors import RunError
from polyfed.core.files import sync_folder

SECRET_MODE = 0o600


@dataclass(frozen=True)
class ServerFolder:
    """Paths in the folder of the federation's server."""

    path: Path

    @property
    def settings(self) -> Path:
        """Hosts and ports."""
        return self.path / "server.yaml"

    @property
    def experiment(self) -> Path:
        """What ``polyfed run`` trains over the sites."""
        return self.path / "experiment.yaml"

    @property
    def authority(self) -> tuple[Path, Path]:
        """Certificate and private key of the federation's certificate authority."""
        return self.path / "ca.crt", self.path / "ca.key"

    @property
    def identity(self) -> tuple[Path, Path]:
        """Certificate and private key of the server."""
        return self.path / "server.crt", self.path / "server.key"

    @property
    def gate(self) -> Path:
        """Configuration of the proxy in front of SuperLink."""
        return self.path / "Caddyfile"

    @property
    def sites(self) -> Path:
        """Folder of the public keys of admitted sites: ``<name>.pub``."""
        return self.path / "sites"

    @property
    def home(self) -> Path:
        """Flower's own folder, with the connection that its command line uses."""
        return self.path / "flower"

    @property
    def logs(self) -> Path:
        """Access log of the gate and log of SuperLink."""
        return self.path / "logs"


@dataclass(frozen=True)
class SiteFolder:
    """Paths in the folder of a site."""

    path: Path

    @property
    def config(self) -> Path:
        """What the site hosts and allows."""
        return self.path / "site.yaml"

    @property
    def connection(self) -> Path:
        """Where the server is and how it is reached."""
        return self.path / "connection.yaml"

    @property
    def authority(self) -> Path:
        """Certificate of the authority that signed the server's certificate."""
        return self.path / "ca.crt"

    @property
    def key(self) -> Path:
        """Private key of the site; it never leaves the folder."""
        return self.path / "node.key"

    @property
    def public_key(self) -> Path:
        """What the server's operator is given."""
        return self.path / "node.pub"

    @property
    def home(self) -> Path:
        """Flower's own folder."""
        return self.path / "flower"


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
    """Whether nobody but the owner may read or write the file."""
    return not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def require_file(path: Path, purpose: str) -> Path:
    """The path, if it is a file.

    Raises:
        RunError: it is not; ``purpose`` says what it is for and where it comes from.
    """
    if not path.is_file():
        raise RunError(f"'{path}' is missing: {purpose}")
    return path
