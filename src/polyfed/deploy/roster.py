"""Roster of a site: keys that it trusts in masked sums, exchanged between the sites without the server."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import write_atomically
from polyfed.core.settings import Settings
from polyfed.deploy.folders import SiteFolder, fingerprint, private_key, public_half, public_key, read_public
from polyfed.deploy.settings import SiteConfig, load_settings, to_yaml
from polyfed.federation.membership import member_ids
from polyfed.privacy.masking.party import SiteIdentity

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
    trusted = {
        client: public_key(entry.key.encode(), client)
        for entry in own_roster(site, config).sites.values()
        for client in entry.clients
        if entry.key is not None
    }
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
        raise ConfigError(
            f"site '{name}' has another key on {config.roster}, {fingerprint(str(entry.key))}; if it has changed it, "
            "set that one to null first"
        )
    changed = sites | {name: entry.model_copy(update={"key": line})}
    SiteRoster.model_validate({"sites": {site: one.model_dump() for site, one in changed.items()}}).write(config.roster)
    return fingerprint(line)
