"""The roster of a site: whose keys it believes in masked sums, as the sites have told each other past the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import write_atomically
from polyfed.core.settings import Settings
from polyfed.deploy.check_network import Finding
from polyfed.deploy.folders import SiteFolder, fingerprint, private_key, public_half, public_key, read_public
from polyfed.deploy.settings import SiteConfig, load_settings, to_yaml
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.membership import member_ids
from polyfed.privacy.masking.party import SiteIdentity

ROSTER_COMMENT = """\
Sites whose clients this one adds up masked replies with, and the key that each signs with.
Have each site's node.pub from the site itself, compare fingerprints over the phone, and write it here with
polyfed deploy trust FOLDER SITE node.pub; what the server says of keys counts for nothing."""


class RosterEntry(Settings):
    """A site and its clients."""

    key: str | None = Field(default=None, description="public key of the site, an OpenSSH line; None: not told yet")
    clients: list[str] = Field(min_length=1, description="ids of the clients that it signs for")

    @field_validator("key")
    @classmethod
    def _is_a_key(cls, line: str | None) -> str | None:
        if line is not None:
            public_key(line.encode(), line[:40])
        return line


class SiteRoster(Settings):
    """All sites of a federation, the own one among them."""

    sites: dict[str, RosterEntry]

    @model_validator(mode="after")
    def _one_site_each(self) -> Self:
        entries = self.sites.values()
        keys = [" ".join(entry.key.split()[:2]) for entry in entries if entry.key is not None]
        for what, listed in (("key", keys), ("client", [name for entry in entries for name in entry.clients])):
            if twice := next((one for one in listed if listed.count(one) > 1), None):
                raise ValueError(f"{what} '{twice}' stands at two sites; each has its own")
        return self

    def write(self, path: Path) -> Path:
        write_atomically(path, to_yaml(self, ROSTER_COMMENT).encode())
        return path


def identity_of(site: SiteFolder, config: SiteConfig) -> SiteIdentity | None:
    """What the clients of a site sign their keys with, and whose they believe; None: it has neither key nor roster.

    Raises:
        RunError: there is a roster and no key, or the key is not the one on the roster.
        ConfigError: the roster is damaged, or lacks the site or one of its clients.
    """
    if config.roster is None:
        return SiteIdentity(private_key(site.key)) if site.key.is_file() else None
    roster = own_roster(site, config)
    believed = {
        client: public_key(entry.key.encode(), client)
        for entry in roster.sites.values()
        for client in entry.clients
        if entry.key is not None
    }
    return SiteIdentity(private_key(site.key), believed)


def own_roster(site: SiteFolder, config: SiteConfig) -> SiteRoster:
    """The roster of a site, with its own key.

    Raises:
        RunError: the site has no key, or another one than the roster says.
        ConfigError: the roster is damaged, or lacks the site or one of its clients.
    """
    assert config.roster is not None
    roster, own = load_settings(SiteRoster, config.roster), public_half(site.key)
    entry = roster.sites.get(config.name)
    own_clients = {client for group, settings in config.clients.items() for client in member_ids(group, settings.count)}
    missing = sorted(own_clients - set(entry.clients if entry else ()))
    if entry is None or missing:
        raise ConfigError(f"{config.roster}: sites.{config.name}: no clients {', '.join(missing)}; add them")
    if entry.key is not None and " ".join(entry.key.split()[:2]) != own:
        raise RunError(f"{config.roster}: sites.{config.name}: its key is not that of {site.key}; set it to null")
    return roster.model_copy(update={"sites": roster.sites | {config.name: entry.model_copy(update={"key": own})}})


def trust_key(folder: Path, name: str, public: Path, clients: list[str]) -> str:
    """Write the key of another site into a site's roster; its fingerprint.

    Args:
        folder: of the site that holds the roster.
        name: of the other site.
        public: its ``node.pub``, as it came from there.
        clients: ids, of a site that is not on the roster.

    Raises:
        ConfigError: the site has no roster, the name is not on it, or has another key there.
        RunError: not an ECDSA public key.
    """
    config = SiteConfig.load(SiteFolder(folder).config)
    if config.roster is None:
        raise ConfigError(f"site '{config.name}' has no roster; set 'roster: roster.yaml' in site.yaml, and make it")
    line, sites = read_public(public), load_settings(SiteRoster, config.roster).sites
    if name not in sites and not clients:
        valid = ", ".join(sites)
        raise ConfigError(f"site '{name}' is not on {config.roster} ({valid}); to add it, give its clients (--client)")
    entry = sites.get(name) or RosterEntry(clients=clients)
    if entry.key is not None and " ".join(entry.key.split()[:2]) != line:
        raise ConfigError(
            f"site '{name}' has another key on {config.roster}, {fingerprint(entry.key)}; if it has changed it, set "
            "that one to null first"
        )
    changed = sites | {name: entry.model_copy(update={"key": line})}
    SiteRoster.model_validate({"sites": {site: one.model_dump() for site, one in changed.items()}}).write(config.roster)
    return fingerprint(line)


def check_roster(site: SiteFolder, config: SiteConfig, plan: RunSpec | None) -> Iterator[Finding]:
    """Whether masked sums can be told from those of a server that plays the other clients."""
    if config.roster is None:
        if plan is not None and plan.secure is not None and plan.secure.masks:
            detail = "none: whoever runs the server could send keys of its own, and read what this site's clients send"
            yield Finding("warning", "roster", detail, "set roster in site.yaml, and write the sites' keys into it")
        return
    sites = own_roster(site, config).sites
    for name, entry in sites.items():
        if entry.key is None:
            remedy = f"have its node.pub from the site itself, then: polyfed deploy trust {site.path} {name} node.pub"
            yield Finding("error", "roster", f"no key of site '{name}'", remedy)
    keys = ", ".join(f"{name} {fingerprint(entry.key)}" for name, entry in sites.items() if entry.key is not None)
    yield Finding("ok", "roster", f"{keys}; compare them with the sites, over the phone")
