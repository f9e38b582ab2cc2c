"""Files of a server and its sites: ``server.yaml``, ``connection.yaml``, ``site.yaml``, ``agreed.yaml``, rosters.

A roster has the keys that a site trusts in masked sums, exchanged between the sites without the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self, TypeVar

import yaml
from pydantic import Field, field_validator, model_validator

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import paths_from, write_atomically
from polyfed.core.settings import Place, PlaceBeside, Settings, parse_settings
from polyfed.deploy.folders import SiteFolder, fingerprint, private_key, public_half, public_key, read_public
from polyfed.federation.membership import member_ids
from polyfed.federation.settings import DataSettings, SiteSettings
from polyfed.privacy.accounting import Neighbours
from polyfed.privacy.masking.party import SiteIdentity
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
                what = f"clients.{group}: a group carries the name of its site"
                raise ValueError(f"{what}; call it '{self.name}' or '{self.name}-{group}'")
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


ROSTER_COMMENT = """\
Sites with whose clients this one sums masked replies, and the signing key of each.
Get each site's node.pub from the site itself, compare fingerprints over the phone, and write it here with
polyfed deploy trust FOLDER SITE node.pub; keys from the server are not trusted."""


class RosterEntry(Settings):
    """A site and its clients."""

    key: str | None = Field(default=None, description="public key of the site, an OpenSSH line; None: unknown yet")
    clients: list[str] = Field(min_length=1, description="ids of the clients for which it signs")

    @field_validator("key")
    @classmethod
    def _is_a_key(cls, line: str | None) -> str | None:
        if line is not None:
            public_key(line.encode(), line[:40])
        return line

    def has_other_key(self, line: str) -> bool:
        return self.key is not None and " ".join(self.key.split()[:2]) != line


class SiteRoster(Settings):
    """All sites of a federation, this one included."""

    sites: dict[str, RosterEntry]

    @model_validator(mode="after")
    def _one_site_each(self) -> Self:
        entries = self.sites.values()
        keys = [" ".join(entry.key.split()[:2]) for entry in entries if entry.key is not None]
        for what, listed in (("key", keys), ("client", [name for entry in entries for name in entry.clients])):
            if twice := next((one for one in listed if listed.count(one) > 1), None):
                raise ValueError(f"{what} '{twice}' is listed for two sites; each has its own")
        return self

    def write(self, path: Path) -> Path:
        write_atomically(path, to_yaml(self, ROSTER_COMMENT).encode())
        return path


def identity_of(site: SiteFolder, config: SiteConfig) -> SiteIdentity | None:
    """Signing key of a site's clients and the keys they trust; None if the site has neither key nor roster.

    Raises:
        RunError: there is a roster and no key, or the key is not the one on the roster.
        ConfigError: the roster is damaged, or lacks the site or one of its clients.
    """
    if config.roster is None:
        return SiteIdentity(private_key(site.key)) if site.key.is_file() else None
    entries = own_roster(site, config).sites.values()
    known = {client: entry.key for entry in entries for client in entry.clients if entry.key is not None}
    trusted = {client: public_key(key.encode(), client) for client, key in known.items()}
    return SiteIdentity(private_key(site.key), trusted)


def own_roster(site: SiteFolder, config: SiteConfig) -> SiteRoster:
    """The roster of a site, with its own key.

    Raises:
        RunError: the site has no key, or another one than on the roster.
        ConfigError: the roster is damaged, or lacks the site or one of its clients.
    """
    assert config.roster is not None
    roster, own = load_settings(SiteRoster, config.roster), public_half(site.key)
    entry = roster.sites.get(config.name)
    own_clients = {client for group, settings in config.clients.items() for client in member_ids(group, settings.count)}
    missing = sorted(own_clients - set(entry.clients if entry else ()))
    if entry is None or missing:
        raise ConfigError(f"{config.roster}: sites.{config.name}: no clients {', '.join(missing)}; add them")
    if entry.has_other_key(own):
        raise RunError(f"{config.roster}: sites.{config.name}: its key is not that of {site.key}; set it to null")
    return roster.model_copy(update={"sites": roster.sites | {config.name: entry.model_copy(update={"key": own})}})


def trust_key(folder: Path, name: str, public: Path, clients: list[str]) -> str:
    """Write the key of another site into a site's roster; returns its fingerprint.

    Args:
        folder: Folder of the site that holds the roster.
        name: Name of the other site.
        public: The other site's ``node.pub``, as it came from there.
        clients: Client ids of a site that is not on the roster.

    Raises:
        ConfigError: the site has no roster, the name is not on it, or has another key there.
        RunError: the file is not an ECDSA public key.
    """
    config = SiteConfig.load(SiteFolder(folder).config)
    if config.roster is None:
        raise ConfigError(f"site '{config.name}' has no roster; set 'roster: roster.yaml' in site.yaml, and make it")
    line, sites = read_public(public), load_settings(SiteRoster, config.roster).sites
    if name not in sites and not clients:
        valid = ", ".join(sites)
        raise ConfigError(f"site '{name}' is not on {config.roster} ({valid}); to add it, give its clients (--client)")
    entry = sites.get(name) or RosterEntry(clients=clients)
    if entry.has_other_key(line):
        what = f"site '{name}' has another key on {config.roster}, {fingerprint(str(entry.key))}"
        raise ConfigError(f"{what}; if it has changed it, set that one to null first")
    changed = sites | {name: entry.model_copy(update={"key": line})}
    SiteRoster.model_validate({"sites": {site: one.model_dump() for site, one in changed.items()}}).write(config.roster)
    return fingerprint(line)
