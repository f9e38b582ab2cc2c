"""Files of a server and its sites: ``server.yaml``, ``connection.yaml``, ``site.yaml`` and ``agreed.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

import yaml
from pydantic import Field, field_validator, model_validator

from polyfed.core.errors import ConfigError
from polyfed.core.files import paths_from
from polyfed.core.settings import Place, PlaceBeside, Settings, parse_settings
from polyfed.federation.settings import DataSettings, SiteSettings
from polyfed.privacy.accounting import Neighbours
from polyfed.runs.config_files import read_config
from polyfed.wire.limits import Limits

PUBLIC_PORT = 9443
SUPERLINK_PORT = 9091


class ServerAddress(Settings):
    """Addresses of the server: the gate for the sites, SuperLink on 127.0.0.1 only."""

    hosts: list[str] = Field(min_length=1, description="names or addresses under which sites reach the gate")
    port: int = Field(default=PUBLIC_PORT, ge=1, le=65535, description="public port of the gate")
    superlink_port: int = Field(default=SUPERLINK_PORT, ge=1, le=65535, description="port of SuperLink on 127.0.0.1")


class Connection(Settings):
    """Address of a site's federation."""

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
        return self.server.rpartition(":")[0].strip("[]")  # IPv6 addresses are in brackets

    @property
    def port(self) -> int:
        return int(self.server.rpartition(":")[2])


Demanded = Literal["allowed", "protected", "summed", "never"]
"""Rule for a type of tensors: leaves as it is, with differential privacy only, in masked sums only, or never."""


class ProtectionDemands(Settings):
    """Demands of a site on runs; a run that does not meet them is refused before anything is computed."""

    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="largest epsilon of each client's replies over all runs; None: runs without privacy are allowed",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta of max_epsilon")
    neighbours: Neighbours = Field(
        default="replace", description="data sets between which noise in training is meant; as privacy.neighbours"
    )
    sums: Literal["allowed", "only"] = Field(
        default="allowed",
        description="only: all replies to steps of training leave in masked sums; numbers such as losses do not leave",
    )
    smallest_range: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="least aggregation.secure.range; None: any"
    )
    plan: Literal["exact", "any"] = Field(
        default="any", description="exact: a run that differs from plan.yaml, or has more rounds, is refused"
    )
    weights: Demanded = Field(
        default="allowed",
        description="trained weights may leave as they are, protected by differential privacy, summed under masks, or "
        "never",
    )
    representations: Demanded = Field(default="allowed", description="the same for representations of public samples")
    logits: Demanded = Field(default="allowed", description="the same for class scores of public samples")
    metrics: bool = Field(default=False, description="whether test metrics may leave, in the clear")


class ExpectedData(Settings):
    """Description of a source's data where the federation's folders were made: real data, or a sample."""

    split: str = Field(default="train", description="split of the data")
    columns: dict[str, str] = Field(description="modality or target -> its column")
    classes: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="target -> names of its classes, in the order of their numbers"
    )
    items: int = Field(ge=0, description="number of items")
    language: str | None = Field(default=None, description="language of the texts; None: English, or no texts")


class SiteData(DataSettings):
    """Data of a site; relative paths of its sources start from the folder of the file."""

    dir: PlaceBeside | None = Field(default=Path(), validate_default=True, description="start of relative paths")


class SiteConfig(SiteSettings):
    """A site: its clients with their data, models and tasks, and its limits and demands.

    Relative paths start from the file's folder. A group of one client gives the client its name. Names of groups begin
    with the site's, so that no site can describe another one's clients.
    """

    data: SiteData
    expected: dict[str, ExpectedData] = Field(
        default_factory=dict, description="source -> description of its data, for polyfed deploy check"
    )
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="name of the site in the federation")
    state_dir: Place = Field(default=Path("state"), description="folder of the clients' states between rounds")
    algorithms: list[str] = Field(
        default_factory=list,
        description="methods that may run here, by the name in a configuration; empty: all that polyfed ships",
    )
    public_digest: str | None = Field(default=None, description="agreed digest of the public set; None: not compared")
    limits: Limits = Field(default_factory=Limits, description="limits on messages from the server")
    demands: ProtectionDemands | None = Field(default=None, description="protection that a run must have; None: none")
    roster: Place | None = Field(
        default=None,
        description="file of the sites whose keys this site trusts in masked sums; None: any that the server sends",
    )
    tracebacks: bool = Field(
        default=False,
        description="whether message and traceback of a failed step, which may show data, are sent to the server; else "
        "the class of error and a number, under which the site's log has the text",
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

    @property
    def demanded(self) -> ProtectionDemands:
        """The site's demands; without any, those that allow everything."""
        return self.demands or ProtectionDemands()

    @classmethod
    def load(cls, path: Path) -> SiteConfig:
        """Read a site file.

        Raises:
            ConfigError: the file is missing or not YAML, or a key or value is wrong.
        """
        with paths_from(path.resolve().parent):
            return parse_settings(cls, read_config(path))


_S = TypeVar("_S", bound=Settings)


def load_settings(settings: type[_S], path: Path) -> _S:
    """Settings from a YAML file.

    Raises:
        ConfigError: the file is missing or not YAML, or a key or value is wrong; the message names the file.
    """
    content = read_config(path)
    try:
        return parse_settings(settings, content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def to_yaml(
    settings: Settings | Mapping[str, object], comment: str, notes: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Settings as YAML with a comment at its head; with notes, one before each key, inner mappings are on one line."""
    content = settings.model_dump(mode="json") if isinstance(settings, Settings) else settings
    parts = [f"# {line}\n" for line in comment.splitlines()]
    for key, value in content.items():
        flow = None if notes and isinstance(value, dict | list) else False
        text = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=110)
        parts += [f"# {notes[key]}\n", text] if key in notes else [text]
    return "".join(parts)
