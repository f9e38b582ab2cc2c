"""Rosters: whose keys a site believes in masked sums; written by init, filled in by people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from federations import experiment_settings
from typer.testing import CliRunner

from polyfed.cli.deploy import deploy_app
from polyfed.core.errors import ConfigError, PolyfedError, RunError
from polyfed.deploy.check import check_site
from polyfed.deploy.check_network import Finding
from polyfed.deploy.folders import SiteFolder, create_keys, fingerprint, read_public
from polyfed.deploy.host import open_host
from polyfed.deploy.init import create_federation
from polyfed.deploy.settings import SiteConfig, SiteRoster, identity_of, load_settings, trust_key
from polyfed.runs.experiment import Experiment


def experiment() -> Experiment:
    return Experiment.load(experiment_settings() | {"aggregation": {"secure": "pairwise_masks"}})


def make(folder: Path, *, keys: bool = True) -> SiteFolder:
    """The folder of ``hospital``, which has two clients; ``archive`` is the other site."""
    create_federation(folder, experiment(), ["localhost"], keys=keys)
    return SiteFolder(folder / "hospital")


def findings(site: SiteFolder) -> list[Finding]:
    return [finding for finding in check_site(site.path, network=False) if finding.what == "roster"]


def change(site: SiteFolder, name: str, **values: Any) -> None:
    content = yaml.safe_load(site.roster.read_text())
    content["sites"].setdefault(name, {}).update(values)
    site.roster.write_text(yaml.safe_dump(content))


def test_init_writes_sites_and_their_clients(tmp_path: Path) -> None:
    site = make(tmp_path / "f")
    sites = load_settings(SiteRoster, site.roster).sites
    clients = {"archive": ["archive"], "hospital": ["hospital-0", "hospital-1"]}
    assert {name: entry.clients for name, entry in sites.items()} == clients
    archive = read_public(tmp_path / "f" / "archive" / "node.pub")
    assert sites["archive"].key == archive
    (seen,) = findings(site)
    assert seen.level == "ok"
    assert f"archive {fingerprint(archive)}" in seen.detail
    assert SiteConfig.load(site.config).roster == site.roster


def test_unmasked_federations_have_none(tmp_path: Path) -> None:
    create_federation(tmp_path / "f", Experiment.load(experiment_settings()), ["localhost"], keys=True)
    site = SiteFolder(tmp_path / "f" / "hospital")
    assert not site.roster.exists()
    assert SiteConfig.load(site.config).roster is None
    assert findings(site) == []


def test_keys_are_exchanged_by_people(tmp_path: Path) -> None:
    site = make(tmp_path / "f", keys=False)
    for name in ("archive", "hospital"):
        create_keys(tmp_path / "f" / name, name)
    (missing, _) = findings(site)
    assert (missing.level, missing.detail) == ("error", "no key of site 'archive'")
    public = tmp_path / "f" / "archive" / "node.pub"
    done = CliRunner().invoke(deploy_app, ["trust", str(site.path), "archive", str(public)])
    assert done.output == f"trusted: archive ({fingerprint(read_public(public))})\n"
    assert site.roster.read_text().startswith("# Sites with whose clients")
    (seen,) = findings(site)
    assert seen.level == "ok"
    identity = identity_of(site, SiteConfig.load(site.config))
    assert identity is not None
    assert set(identity.roster or {}) == {"archive", "hospital-0", "hospital-1"}, "its own key need not be written"


def test_a_site_with_masked_sums_and_without_a_roster_is_warned(tmp_path: Path) -> None:
    site = make(tmp_path / "f")
    site.config.write_text(yaml.safe_dump(yaml.safe_load(site.config.read_text()) | {"roster": None}))
    (seen,) = findings(site)
    assert seen.level == "warning"
    assert "the server could send keys of its own" in seen.detail
    identity = identity_of(site, SiteConfig.load(site.config))
    assert identity is not None, "it signs for the sites that have one"
    assert identity.roster is None


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("hospital", {"clients": ["hospital-0"]}, "sites.hospital: no clients hospital-1; add them"),
        ("archive", {"clients": ["archive", "hospital-1"]}, "client 'hospital-1' is listed for two sites"),
        ("archive", {"key": "ssh-ed25519 AAAA"}, "is not an OpenSSH public key"),
        ("archive", {"key": "own"}, r"key 'ecdsa-sha2-nistp384 .*' is listed for two sites"),
        ("hospital", {"key": "new"}, "its key is not that of .*node.key; set it to null"),
    ],
)
def test_a_wrong_roster_is_refused_by_the_site(tmp_path: Path, name: str, values: dict[str, Any], message: str) -> None:
    site = make(tmp_path / "f")
    made = {"own": site.public_key, "new": create_keys(tmp_path / "new")}
    if path := made.get(str(values.get("key"))):
        values = {"key": read_public(path)}
    change(site, name, **values)
    with pytest.raises(PolyfedError, match=message):
        open_host(experiment().spec("a-run", "").model_dump_json(), {"config": str(site.config)})
    assert [finding.level for finding in findings(site)] == ["error"]


def test_a_site_opens_a_masked_run_with_its_key_and_roster(tmp_path: Path) -> None:
    site = make(tmp_path / "f")
    opened = open_host(experiment().spec("a-run", "").model_dump_json(), {"config": str(site.config)})
    assert opened.site.terms.identity is not None
    assert set(opened.site.terms.identity.roster or {}) == {"archive", "hospital-0", "hospital-1"}
    site.key.unlink()
    with pytest.raises(RunError, match=r"node\.key' is missing"):
        open_host(experiment().spec("b-run", "").model_dump_json(), {"config": str(site.config)})


def test_another_key_for_a_site_is_not_taken_without_a_persons_hand(tmp_path: Path) -> None:
    site, new = make(tmp_path / "f"), create_keys(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"site 'archive' has another key on .*roster.yaml, SHA256:.*to null first"):
        trust_key(site.path, "archive", new, [])
    change(site, "archive", key=None)
    assert trust_key(site.path, "archive", new, []) == fingerprint(read_public(new))


def test_a_site_that_is_new_brings_its_clients(tmp_path: Path) -> None:
    site, new = make(tmp_path / "f"), create_keys(tmp_path / "new")
    message = r"site 'clinic' is not on .*\(archive, hospital\); to add it, give its clients"
    with pytest.raises(ConfigError, match=message):
        trust_key(site.path, "clinic", new, [])
    trust_key(site.path, "clinic", new, ["clinic-0", "clinic-1"])
    assert load_settings(SiteRoster, site.roster).sites["clinic"].clients == ["clinic-0", "clinic-1"]
