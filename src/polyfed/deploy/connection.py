"""What a server and its sites must agree on to find each other: ``server.yaml`` and ``connection.yaml``."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import Field, field_validator

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.runs.experiment import parse_settings, read_config

PUBLIC_PORT = 9443
SUPERLINK_PORT = 9091


class ServerAddress(Settings):
    """Where the server listens: the gate for everybody, SuperLink on 127.0.0.1 alone."""

    hosts: list[str] = Field(min_length=1, description="names or addresses under which sites reach the gate")
    port: int = Field(default=PUBLIC_PORT, ge=1, le=65535, description="public port of the gate")
    superlink_port: int = Field(default=SUPERLINK_PORT, ge=1, le=65535, description="port of SuperLink on 127.0.0.1")


class Connection(Settings):
    """How a site reaches its federation."""

    server: str = Field(description="host:port of the gate")
    seed: int = Field(default=0, ge=0, description="seed of the federation: fixes the order of the public set")
    node_port: int = Field(
        default=0, ge=0, le=65535, description="port on 127.0.0.1 between SuperNode and its processes; 0: a free one"
    )

    @field_validator("server")
    @classmethod
    def _host_and_port(cls, text: str) -> str:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("must be host:port, as fl.example.org:9443")
        return text

    @property
    def host(self) -> str:
        """Name or address of the server."""
        return self.server.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of the gate."""
        return int(self.server.rpartition(":")[2])


_S = TypeVar("_S", bound=Settings)


def load_settings(kind: type[_S], path: Path) -> _S:
    """Settings from a YAML file.

    Raises:
        ConfigError: not there, not YAML, or a key or value is wrong; the message names the file.
    """
    content = read_config(path)
    try:
        return parse_settings(kind, content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def to_yaml(settings: Settings, comment: str) -> str:
    """Settings as YAML under a comment of one line or more."""
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
