"""One experiment becomes a server's folder and a folder for each site."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from federations import Folders, experiment_settings, hosts_of, with_files

from polyfed.core.errors import ConfigError, RunError
from polyfed.deploy import flower_programs
from polyfed.deploy.engines.flower_pull import largest_message
from polyfed.deploy.flower_programs import program
from polyfed.deploy.folders import ServerFolder, create_keys, public_half, read_certificate, read_public, write_new
from polyfed.deploy.gate import caddyfile
from polyfed.deploy.init import admit_site, create_federation, renew_certificate
from polyfed.deploy.serve import site_commands
from polyfed.deploy.settings import Connection, ServerAddress, SiteConfig, load_settings, to_yaml
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment


def create(folder: Path, settings: dict[str, Any] | None = None, **options: Any) -> dict[str, Path]:
    return create_federation(folder, Experiment.read(settings or experiment_settings()), ["fl.example.org"], **options)


def test_there_is_a_folder_for_the_server_and_every_group(tmp_path: Path) -> None:
    made = create(tmp_path / "f")
    assert {name: path.name for name, path in made.items()} == {n: n for n in ("server", "archive", "hospital")}
    assert not list((tmp_path / "f").rglob("node.*")), "keys are made at the sites"
    secrets = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "f").rglob("*.key")}
    assert secrets == {"ca.key": 0o600, "server.key": 0o600}


def test_a_site_gets_no_secret_and_only_its_own_sources(tmp_path: Path) -> None:
    create(tmp_path / "f")
    site = tmp_path / "f" / "archive"
    files = {"site.yaml", "agreed.yaml", "connection.yaml", "plan.yaml", "ca.crt"}
    assert {p.relative_to(site).as_posix() for p in site.rglob("*") if p.is_file()} == files
    config = SiteConfig.load(site / "site.yaml")
    assert set(config.data.sources) == {"reports", "shared"}
    assert set(config.clients) == {"archive"}
    assert config.algorithms == ["fedavg"]
    assert config.state_dir == site / "state"
    assert config.data.dir == site
    assert load_settings(Connection, site / "connection.yaml") == Connection(server="fl.example.org:9443", seed=0)


def test_groups_are_split_without_loss(tmp_path: Path) -> None:
    experiment = Experiment.load(experiment_settings())
    create(tmp_path / "f")
    for name, group in experiment.clients.items():
        config = SiteConfig.load(tmp_path / "f" / name / "site.yaml")
        assert config.clients == {name: group}
        assert config.public == experiment.public
        assert config.public_digest is not None


def test_the_server_runs_the_same_experiment_over_superlink(tmp_path: Path) -> None:
    settings = experiment_settings() | {"aggregation": {"clip": {"times": 2.0, "weight": None}}}
    create(tmp_path / "f", settings, superlink_port=9191)
    content = yaml.safe_load((tmp_path / "f" / "server" / "experiment.yaml").read_text())
    assert "clients" not in content
    assert set(content["data"]["sources"]) == {"shared"}
    engine = {"name": "flower", "superlink": "127.0.0.1:9191", "root_certificates": "ca.crt"}
    engine |= {"sites": ["archive", "hospital"], "clients": {"hospital": 2}}
    assert content["run"].pop("engine") == engine
    again = Experiment.load(content)
    before = Experiment.load(settings)
    assert (again.algorithm, again.aggregation) == (before.algorithm, before.aggregation)


def test_a_site_writes_where_its_data_lie_and_agrees_on_all_else(tmp_path: Path) -> None:
    settings = with_files(tmp_path)
    settings["data"]["sources"]["shared"] = {"name": "parquet", "path": "public"}  # of which nothing is at hand
    made = create(tmp_path / "f", settings)
    text = (made["archive"] / "site.yaml").read_text()
    content = yaml.safe_load(text)
    assert content["data"]["sources"] == {"reports": {"path": "data/reports.csv"}, "shared": {"path": "data/shared"}}
    assert {"clients", "public", "public_digest"}.isdisjoint(content)
    assert len(text.splitlines()) < 35
    agreed = (made["archive"] / "agreed.yaml").read_text()
    assert "path" not in agreed
    assert str(tmp_path) not in text + agreed
    config = SiteConfig.load(made["archive"] / "site.yaml")
    assert config.public_digest is None
    expected = config.expected["reports"]
    assert (expected.items, expected.language) == (32, "German")
    assert (expected.columns, expected.classes) == ({"text": "text", "topic": "topic"}, {"topic": ("a", "b")})


def test_sites_on_one_machine_are_admitted_and_use_the_data_where_they_lie(tmp_path: Path) -> None:
    made = create(tmp_path / "f", with_files(tmp_path), keys=True)
    config = yaml.safe_load((made["archive"] / "site.yaml").read_text())
    assert config["data"]["sources"]["reports"] == {"path": str(tmp_path / "letters.csv")}
    for name in ("archive", "hospital"):
        admitted = read_public(ServerFolder(made["server"]).sites / f"{name}.pub")
        assert admitted == public_half(made[name] / "node.key")


def test_weights_of_a_site_are_looked_for_in_its_folder(tmp_path: Path) -> None:
    settings = experiment_settings()
    settings["data"] |= {"weights_dir": str(tmp_path), "dir": "relative"}
    made = create(tmp_path / "f", settings)
    assert SiteConfig.load(made["archive"] / "site.yaml").data.weights_dir == made["archive"] / "weights"
    server = yaml.safe_load((made["server"] / "experiment.yaml").read_text())
    assert server["data"]["dir"] == str(Path("relative").resolve())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (merged(experiment_settings(), {"clients": {"hospital": {"missing": {"rates": {"text": 0.5}}}}}),
         "missing takes data away for simulations"),
        (merged(experiment_settings(), {"run": {"pace": {"name": "sync", "clients": "drawn"}}}),
         "run.pace.clients: a deployment has a real clock"),
        (experiment_settings() | {"clients": {}}, "no clients"),
        *((experiment_settings() | {"clients": {name: experiment_settings()["clients"]["archive"]}}, message)
          for name, message in (("server", "cannot be called 'server'"), ("a/b", r"clients\.a/b"),
                                ("..", r"clients\.\.\."))),
    ],
)  # fmt: skip
def test_what_cannot_be_a_federation_leaves_nothing(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create(tmp_path / "f", settings)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_host_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a name nor an address"):
        create_federation(tmp_path / "f", Experiment.load(experiment_settings()), ["https://x"])
    with pytest.raises(ConfigError, match="hosts"):
        create_federation(tmp_path / "f", Experiment.load(experiment_settings()), [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    write_new(tmp_path / "f" / "precious", "x")
    with pytest.raises(RunError, match="exists already"):
        create(tmp_path / "f")
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["precious"]


def test_admitting_checks_the_key_and_the_name(tmp_path: Path, fresh: Folders) -> None:
    public = create_keys(tmp_path / "new")
    assert read_public(admit_site(fresh.server.path, "clinic", public)) == read_public(public)
    with pytest.raises(RunError, match="exists already"):
        admit_site(fresh.server.path, "clinic", public)
    with pytest.raises(RunError, match="not an OpenSSH public key"):
        admit_site(fresh.server.path, "other", tmp_path / "new" / "node.key")
    for name in ("../x", "", ".x", "a b"):
        with pytest.raises(ConfigError, match="names have"):
            admit_site(fresh.server.path, name, public)


def test_renewal_keeps_the_authority(fresh: Folders) -> None:
    certificate, key = fresh.server.identity
    before, authority = certificate.read_bytes(), fresh.server.authority[0].read_bytes()
    assert renew_certificate(fresh.server.path) == ("localhost",)
    assert certificate.read_bytes() != before
    assert fresh.server.authority[0].read_bytes() == authority
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert renew_certificate(fresh.server.path, ["b.example.org"]) == ("b.example.org",)
    assert hosts_of(read_certificate(certificate))[0] == "b.example.org"
    fresh.server.authority[1].unlink()
    with pytest.raises(RunError, match="bring the authority's key back"):
        renew_certificate(fresh.server.path)


# ---- files that people edit


@pytest.mark.parametrize("server", ["fl.example.org", "fl.example.org:x", ":9443", "h:0", "h:70000"])
def test_an_address_without_a_port_is_refused(tmp_path: Path, server: str) -> None:
    path = write_new(tmp_path / "connection.yaml", f"server: '{server}'\n")
    with pytest.raises(ConfigError, match=r"connection\.yaml: server: must be host:port"):
        load_settings(Connection, path)


def test_connections_are_read_back(tmp_path: Path) -> None:
    connection = Connection(server="[2001:db8::7]:9443", seed=3)
    assert (connection.host, connection.port) == ("2001:db8::7", 9443)
    path = write_new(tmp_path / "c.yaml", to_yaml(connection, "one\ntwo"))
    assert path.read_text().startswith("# one\n# two\nserver:")
    assert load_settings(Connection, path) == connection
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_settings(ServerAddress, tmp_path / "absent.yaml")


# ---- the gate


@pytest.mark.parametrize("host", ["fl.example.org", "localhost", "192.0.2.7", "2001:db8::7"])
def test_caddy_takes_the_configuration(fresh: Folders, host: str) -> None:
    fresh.server.gate.write_text(caddyfile(host, 9443, 9091))
    command = [program("caddy"), "validate", "--config", "Caddyfile", "--adapter", "caddyfile"]
    seen = subprocess.run(command, cwd=fresh.server.path, capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stderr


@pytest.mark.parametrize(("host", "bound"), [("localhost", True), ("127.0.0.2", True), ("::1", True), ("a.org", False)])
def test_a_gate_for_this_machine_alone_is_bound_to_loopback(host: str, bound: bool) -> None:
    assert ("bind 127.0.0.1\n" in caddyfile(host, 1, 2)) is bound


def test_caddy_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *a, **k: None)
    with pytest.raises(RunError, match=r"'caddy' is missing.*polyfed\[deploy\]"):
        program("caddy")
    with pytest.raises(RunError, match="'flwr' is missing"):
        flower_programs.program("flwr")


# ---- Flower's command lines


def test_a_site_may_be_sent_as_much_as_all_its_clients_may(made: Folders) -> None:
    site = made.site("hospital")
    config = SiteConfig.load(site.config)
    command = site_commands(site, Connection(server="h:1"), config, Path("socket"))["connection"]
    assert command[-4:] == ["h:1", str(site.path), "socket", str(largest_message(config.limits, [None, None]))]


def test_the_environment_is_quiet_and_goes_past_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "intra.example.org")
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    made = flower_programs.flower_environment(tmp_path)
    assert made["FLWR_TELEMETRY_ENABLED"] == "0"
    assert made["FLWR_DISABLE_UPDATE_CHECK"] == made["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert made["NO_PROXY"] == "intra.example.org,127.0.0.1,localhost"
    assert made["FLWR_HOME"] == str(tmp_path)


def test_superlink_is_never_started_open(made: Folders) -> None:
    command = flower_programs.superlink_command(made.server, made.address)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert not {"--insecure", "--database"} & set(command)
    assert command[command.index("--superexec-auth-secret-file") + 1] == str(made.server.secret)
    assert made.server.secret.stat().st_mode & 0o777 == 0o600


def archive(folder: Path, *changes: str) -> SiteConfig:
    create_federation(folder / "f", Experiment.load(experiment_settings(), changes), ["localhost"])
    return SiteConfig.load(folder / "f" / "archive" / "site.yaml")


def test_superlink_gives_no_new_tokens_for_old_ones(tmp_path: Path) -> None:
    """Flower's own plugin, which it extends, does."""
    from polyfed.deploy.superlink import SecretPlugin

    plugin = SecretPlugin(b"secret")
    tokens = [[("flwr-oidc-access-token", token)] for token in ("secret", "another", "")]
    assert [plugin.validate_tokens_in_metadata(token)[0] for token in [*tokens, []]] == [True, False, False, False]
    assert plugin.refresh_tokens(tokens[1]) == (None, None)


def test_a_site_config_has_the_limits_of_the_experiment(tmp_path: Path) -> None:
    assert archive(tmp_path, "run.exchange.limits.row_norm=5").limits.row_norm == 5


def test_a_site_has_the_second_source_of_its_group(tmp_path: Path) -> None:
    changes = ["data.sources.more={name: scenes, seed: 5}", "clients.archive.also={source: more, items: 4}"]
    config = archive(tmp_path, *changes)
    assert "more" in config.data.sources
    also = config.clients["archive"].also
    assert also is not None
    assert (also.source, also.items) == ("more", 4)
