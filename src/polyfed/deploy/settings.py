"""Files of a server and its sites: ``server.yaml``, ``connection.yaml``, ``site.yaml`` and ``agreed.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

import yaml
from pydantic import Field, field_validator, model_validator

from polyfed.core.errors import ConfigError
from polyfed.core.files import Place, PlaceBeside, paths_from
from polyfed.core.settings import Settings, parse_settings
from polyfed.federation.settings import DataSettings, SiteSettings
from polyfed.privacy.accounting import Neighbours
from polyfed.runs.config_files import read_config
from polyfed.wire.limits import Limits

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

    @field_validator("server")
    @classmethod
    def _host_and_port(cls, text: str) -> str:
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("must be host:port, as fl.example.org:9443")
        return text

    @property
    def host(self) -> str:
        return self.server.rpartition(":")[0].strip("[]")  # addresses of IPv6 stand in brackets

    @property
    def port(self) -> int:
        return int(self.server.rpartition(":")[2])


Demanded = Literal["allowed", "protected", "summed", "never"]
"""How a kind of tensors may leave: as it is, with differential privacy only, in masked sums only, or not at all."""


class ProtectionDemands(Settings):
    """What a site demands of runs; one that does not meet it is refused before anything is computed."""

    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="most that each client gives away by its replies, over all runs together; None: runs without "
        "privacy may come",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="at which epsilon is meant")
    neighbours: Neighbours = Field(
        default="replace", description="between which data sets, of noise in training; as privacy.neighbours"
    )
    sums: Literal["allowed", "only"] = Field(
        default="allowed",
        description="only: all replies to steps of training leave in masked sums; numbers such as losses do not leave",
    )
    smallest_range: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="of values in masked sums, at least; None: any"
    )
    plan: Literal["exact", "any"] = Field(
        default="any",
        description="exact: a run is as plan.yaml says in everything, and of no more rounds, or it is refused",
    )
    weights: Demanded = Field(
        default="allowed",
        description="trained weights may leave as they are, protected by differential privacy, summed under masks, or "
        "never",
    )
    representations: Demanded = Field(default="allowed", description="the same of representations of public samples")
    logits: Demanded = Field(default="allowed", description="the same of class scores of public samples")
    metrics: bool = Field(default=False, description="whether test metrics may leave, as they are")


class ExpectedData(Settings):
    """Data of a source as they were where the federation's folders were made: real ones, or a sample."""

    split: str = Field(default="train", description="split that they are of")
    columns: dict[str, str] = Field(description="modality or target -> its column")
    classes: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="target -> names of its classes, in the order of their numbers"
    )
    items: int = Field(ge=0, description="how many")
    language: str | None = Field(default=None, description="language of texts; None: English, or no texts")


class SiteData(DataSettings):
    """Data of a site; relative paths of its sources start from the folder of the file."""

    dir: PlaceBeside | None = Field(default=Path(), validate_default=True, description="where relative paths start")


class SiteConfig(SiteSettings):
    """A site: its clients with their data, models and tasks, and what it lets in and out.

    Relative paths are relative to the file. A group of one client gives the client its name. Names of groups begin with
    the site's, so that nobody can describe another site's clients.
    """

    data: SiteData
    expected: dict[str, ExpectedData] = Field(
        default_factory=dict, description="source -> what its data should be like, for polyfed deploy check"
    )
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="name of the site in the federation")
    state_dir: Place = Field(default=Path("state"), description="folder of what the clients keep between rounds")
    algorithms: list[str] = Field(
        default_factory=list,
        description="methods that may run here, by the name in a configuration; empty: all that polyfed ships",
    )
    public_digest: str | None = Field(default=None, description="agreed digest of the public set; None: not compared")
    limits: Limits = Field(default_factory=Limits, description="what the site accepts from the server at most")
    demands: ProtectionDemands | None = Field(default=None, description="protection that a run must have; None: none")
    roster: Place | None = Field(
        default=None,
        description="file of the sites whose keys this site believes in masked sums; None: any that the server sends",
    )
    tracebacks: bool = Field(
        default=False,
        description="whether the server is told message and traceback of a failed step, which may show data, or the "
        "class of error and a number under which the site's log has the rest",
    )

    @model_validator(mode="after")
    def _own_names(self) -> SiteConfig:
        for group in self.clients:
            if group != self.name and not group.startswith(f"{self.name}-"):
                raise ValueError(
                    f"clients.{group}: a group carries the name of its site; call it '{self.name}' or "
                    f"'{self.name}-{group}'"
                )
        return self

    @classmethod
    def load(cls, path: Path) -> SiteConfig:
        """Read a site file.

        Raises:
            ConfigError: not there, not YAML, or a key or value is wrong.
        """
        with paths_from(path.resolve().parent):
            return parse_settings(cls, read_config(path))


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


def to_yaml(
    settings: Settings | Mapping[str, object], comment: str, notes: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Settings as a file with a comment at its head; with notes, each before its key, inner mappings are on a line."""
    content = settings.model_dump(mode="json") if isinstance(settings, Settings) else settings
    parts = [f"# {line}\n" for line in comment.splitlines()]
    for key, value in content.items():
        flow = None if notes and isinstance(value, dict | list) else False
        text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=110)
        parts += [f"# {notes[key]}\n", text] if key in notes else [text]
    return "".join(parts)
