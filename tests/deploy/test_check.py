"""Findings of ``polyfed deploy check``: a healthy site, and every fault by its name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from federations import GERMAN, Folders, Live, experiment_settings, make, with_files, write_letters
from typer.testing import CliRunner

from polyfed.cli.deploy import deploy_app as app
from polyfed.core.errors import RunError
from polyfed.core.files import private_files
from polyfed.deploy import check, check_network
from polyfed.deploy.check import check_site
from polyfed.deploy.check_network import FLEET, FORBIDDEN, Finding, ProbeAnswer, expiry, failed, guarded
from polyfed.deploy.folders import SiteFolder, create_authority, create_keys
from polyfed.deploy.gate import CLOSED, REFUSAL
from polyfed.deploy.settings import SiteConfig
from polyfed.federation.population import Population
from polyfed.wire.payload import Weights

ENGLISH = ("the liver is fine,a", "of the lungs,b")


def offline(site: SiteFolder) -> list[Finding]:
    return list(check_site(site.path, network=False))


def edit(path: Path, **changes: Any) -> None:
    """Set keys given as ``a__b=value``."""
    content = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = content
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    path.write_text(yaml.safe_dump(content))


def population(site: SiteFolder) -> Population:
    """Clients and data as the site's file has them."""
    config = SiteConfig.load(site.config)
    return Population(config.data, config.public, None, config.clients, 0)


def errors(findings: list[Finding]) -> str:
    return "\n".join(str(finding) for finding in findings if finding.level == "error")


def the(findings: list[Finding], what: str) -> Finding:
    (seen,) = (finding for finding in findings if finding.what == what)
    return seen


# ---- a healthy site


def test_a_healthy_site_has_no_error_and_lists_its_data(made: Folders) -> None:
    seen = offline(made.site("hospital"))
    assert not failed(seen), errors(seen)
    assert the(seen, "site.yaml").detail == "site 'hospital' with clients hospital (2)"
    assert the(seen, "public set").detail.endswith("as agreed")
    federation = population(made.site("hospital"))
    for member in federation.members.values():
        count = sum(value.numel() for value in federation.client_model(member).parameters())
        built = f"{count:,} parameters, width 8, image+text; loss on a batch of"
        assert built in the(seen, f"model of {member.id}").detail
        assert f"8 items, {len(federation.train(member))} samples" in the(seen, f"data of {member.id}").detail


def test_classes_are_counted(made: Folders) -> None:
    federation = population(made.site("archive"))
    detail = the(offline(made.site("archive")), "data of archive").detail
    labels = federation.holding(federation.members["archive"])["labels"]
    assert isinstance(labels, dict)
    assert all(f"{name} {count}" in detail for name, count in labels.items())


# ---- what leaves


def leaving(site: SiteFolder, method: str) -> dict[str, str]:
    """Step -> what leaves with it."""
    seen = (finding.detail.split(": ", 2) for finding in offline(site) if finding.what == f"leaves with {method}")
    return {step: reply for _, step, reply in seen}


def test_what_leaves_is_what_the_allowed_method_declares(made: Folders) -> None:
    federation = population(made.site("archive"))
    weights = Weights(federation.client_model(federation.members["archive"]).state_dict())
    seen = leaving(made.site("archive"), "fedavg")
    size = sum(value.numel() * value.element_size() for value in weights.values()) / 2**20
    assert seen["fit"].startswith(f"weights ({len(weights)} tensors of the model, ")
    assert f"{size:,.2f} MiB; in the clear), num_examples (one int; in the clear)" in seen["fit"]
    assert seen["initial"].endswith("slots (one str; in the clear, before any training)")
    assert seen["assess"] == "numbers such as metrics of its test (float; in the clear)"


def test_representations_are_given_with_rows_width_and_bytes(tmp_path: Path) -> None:
    folders = make(tmp_path / "f")
    edit(folders.site("hospital").config, algorithms=["creamfl"])
    edit(folders.site("hospital").plan, algorithm={"name": "creamfl"})
    rows = len(torch.arange(6)) * 5  # five captions per image
    mib = rows * 8 * 4 * 2 / 2**20
    assert leaving(folders.site("hospital"), "creamfl")["fit"] == (
        f"representations (image+text: {rows} x 8 float32 each, {mib:,.2f} MiB in all; in the clear), "
        "num_examples (one int; in the clear)"
    )


def test_without_a_plan_the_replies_are_unknown(fresh: Folders) -> None:
    site = fresh.site("archive")
    site.plan.unlink()
    seen = the(offline(site), "leaves with a run")
    assert (seen.level, seen.remedy) == ("warning", "ask the server's operator for plan.yaml")
    assert "methods that may run here: fedavg" in seen.detail


def test_what_the_server_learns_of_clients_and_of_failures(fresh: Folders) -> None:
    seen = offline(fresh.site("archive"))
    start = the(seen, "leaves at the start").detail
    assert all(part in start for part in ("id archive", "modalities text", "task classification", "samples 24"))
    assert the(seen, "leaves on failure").level == "ok"
    edit(fresh.site("archive").config, tracebacks=True)
    assert the(offline(fresh.site("archive")), "leaves on failure").level == "warning"
    assert "the site runs no program of the server" in the(seen, "never leaves").detail


# ---- faults


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nonsense": 1}, "site.yaml: config: unknown key 'nonsense'"),
        ({"run__attackers": "sign_flip"}, "unknown key 'attackers'"),
        ({"algorithms": ["fedavgg"]}, "method 'fedavg' is not allowed at site 'archive' (algorithms: fedavgg)"),
        ({"public_digest": "0000"}, "but agreed is 0000"),
        ({"clients__archive__source": "absent"}, "'absent' is not in data.sources"),
        ({"run__device": "cuda:77"}, "run.device 'cuda:77' is not usable here"),
        ({"data__sources__reports": {"name": "parquet", "path": "reports"}}, "reports"),
        ({"clients__archive__count": 1000}, "clients.archive.count is 1000"),
        ({"state_dir": "site.yaml/below"}, "cannot be written to"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_fault_in_the_site_file_is_named(fresh: Folders, change: dict[str, Any], message: str) -> None:
    edit(fresh.site("archive").config, **change)
    assert message in errors(offline(fresh.site("archive")))


@pytest.mark.parametrize(
    ("header", "rows", "times", "level", "message"),
    [
        ("text,topic", GERMAN, 18, "", ""),
        ("text,topic", (GERMAN[0], "ein Befund,c"), 18, "error", "expected {'topic': ('a', 'b')}"),
        ("report,topic", GERMAN, 18, "error", "'text'"),  # reported once, although model and data lack it too
        ("text,topic", GERMAN, 9, "warning", "items: found 14, expected 32"),
        ("text,topic", ENGLISH, 18, "warning", "language: found English, or no texts, expected German"),
    ],
    ids=["as agreed", "classes", "columns", "number", "language"],
)
def test_data_are_compared_with_what_was_agreed_upon(
    tmp_path: Path, header: str, rows: tuple[str, ...], times: int, level: str, message: str
) -> None:
    site = make(tmp_path / "f", settings=with_files(tmp_path), keys=False).site("archive")
    write_letters(site.path / "data" / "reports.csv", rows, times, header)
    seen = [finding for finding in offline(site) if "reports" in str(finding) and finding.level != "ok"]
    assert [finding.level for finding in seen] == ([level] if level else [])
    assert message in "\n".join(map(str, seen))


def test_data_that_are_not_there_are_named_by_their_key(tmp_path: Path) -> None:
    site = make(tmp_path / "f", settings=with_files(tmp_path), keys=False).site("archive")
    assert f"data.sources.reports.path: '{site.path / 'data' / 'reports.csv'}' is missing" in errors(offline(site))


def test_one_fault_does_not_hide_the_others(fresh: Folders) -> None:
    site = fresh.site("archive")
    site.key.chmod(0o644)
    site.connection.unlink()
    edit(site.config, run__device="cuda:77", public_digest="0000")
    seen = errors(offline(site))
    for part in ("chmod 600", "connection.yaml", "cuda:77", "agreed is 0000"):
        assert part in seen


def test_a_key_that_is_not_its_public_half_is_found_out(fresh: Folders, tmp_path: Path) -> None:
    site = fresh.site("archive")
    shutil.copy(create_keys(tmp_path / "other"), site.public_key)
    assert "node.pub does not belong to node.key" in errors(offline(site))
    site.key.unlink()
    assert "node.key' is missing" in errors(offline(site))


def test_a_full_disk_is_a_warning_and_then_an_error(fresh: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    site = fresh.site("archive")
    usage = type(shutil.disk_usage("/"))
    for free, level in ((2**20, "error"), (2**28, "warning"), (2**40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(2**41, 0, free))
        assert the(offline(site), "state folder").level == level


def test_another_version_of_flower_is_a_warning(fresh: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "version", lambda name: "1.99.0")
    seen = offline(fresh.site("archive"))
    assert [the(seen, what).level for what in ("versions", "flower")] == ["ok", "warning"]


def test_a_certificate_is_renewed_before_it_ends(fresh: Folders) -> None:
    site = fresh.site("archive")
    for days, level in ((100, "ok"), (10, "warning"), (-1, "error")):
        site.authority.write_bytes(create_authority("x", days=max(days, 0)).certificate)
        if days >= 0:
            assert the(offline(site), "authority").level == level
    assert expiry("x", -1.0, "y", "z").level == "error"


def test_unforeseen_exceptions_are_findings() -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("ok", "first", "fine")
        raise ZeroDivisionError("by zero")

    first, second = guarded("thing", broken)
    assert first.level == "ok"
    assert (second.level, second.what, second.detail) == ("error", "thing", "ZeroDivisionError: by zero")


def test_files_that_others_can_read_are_reported(fresh: Folders) -> None:
    site = fresh.site("archive")
    left = site.path / "cache" / "images.npy"
    left.parent.mkdir()
    left.touch(mode=0o644)
    with private_files():
        announced = the(offline(site), "private files")
    assert announced.level == "warning"
    assert str(left) in announced.detail
    assert announced.remedy == f"chmod -R go= {left.parent}"
    left.chmod(0o600)
    assert not [finding for finding in offline(site) if finding.what == "private files"]


# ---- the way to the server


class FakeServer:
    """Answers by path; what is not given is closed."""

    def __init__(self, answers: dict[str, ProbeAnswer], ahead: float = 0.0) -> None:
        self.answers = answers
        self.date = format_datetime(datetime.now(UTC) - timedelta(seconds=ahead), usegmt=True)

    def __call__(self, host: str, port: int, path: str, *more_arguments: Any, **options: Any) -> ProbeAnswer:
        return self.answers.get(path, ProbeAnswer(404, CLOSED.encode(), self.date))


def faked(site: SiteFolder, monkeypatch: pytest.MonkeyPatch, server: FakeServer) -> list[Finding]:
    monkeypatch.setattr(check_network, "ask", server)
    monkeypatch.setattr(check_network.ssl, "get_server_certificate", lambda *a, **more: site.authority.read_text())
    return [finding for finding in check_site(site.path) if finding.what in _NETWORK]


_NETWORK = ("server", "admission", "server certificate", "clock", "control plane", "CONTROL PLANE")


@pytest.mark.parametrize(
    ("status", "message"),
    [(502, "SuperLink behind it does not"), (404, "in place of the fleet API"), (200, "--enable-supernode-auth")],
)
def test_faults_of_the_server_are_named(
    made: Folders, monkeypatch: pytest.MonkeyPatch, status: int, message: str
) -> None:
    server = FakeServer({FLEET: ProbeAnswer(status, b"", "")})
    assert message in errors(faked(made.site("archive"), monkeypatch, server))


@pytest.mark.parametrize(
    ("answer", "level", "message"),
    [
        (ProbeAnswer(401, b"Invalid SuperNode authentication", ""), "ok", "has admitted this site's key"),
        (ProbeAnswer(401, REFUSAL.encode(), ""), "warning", "send node.pub to the server's operator"),
    ],
)
def test_the_admission_of_the_sites_key_is_reported(
    made: Folders, monkeypatch: pytest.MonkeyPatch, answer: ProbeAnswer, level: str, message: str
) -> None:
    class Asking(FakeServer):
        def __call__(self, host: str, port: int, path: str, *more_arguments: Any, **options: Any) -> ProbeAnswer:
            if path == FLEET:
                return answer if options.get("headers") else ProbeAnswer(401, REFUSAL.encode(), self.date)
            return super().__call__(host, port, path, *more_arguments, **options)

    seen = faked(made.site("archive"), monkeypatch, Asking({}))
    assert [finding.level for finding in seen if message in str(finding)] == [level]


@pytest.mark.parametrize("path", [path for _, path in FORBIDDEN])
def test_an_open_control_plane_is_an_error(made: Folders, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    server = FakeServer({FLEET: ProbeAnswer(401, b"", ""), path: ProbeAnswer(200, b"", "")})
    seen = errors(faked(made.site("archive"), monkeypatch, server))
    assert f"CONTROL PLANE: localhost:{made.address.port} answers at {path} (200)" in seen
    assert "anyone who reaches it may control runs" in seen


@pytest.mark.parametrize(("ahead", "level"), [(0, "ok"), (30, "error"), (-60, "ok"), (-400, "error")])
def test_a_wrong_clock_is_an_error(made: Folders, monkeypatch: pytest.MonkeyPatch, ahead: float, level: str) -> None:
    server = FakeServer({}, ahead)
    server.answers = {FLEET: ProbeAnswer(401, b"", server.date)}
    assert the(faked(made.site("archive"), monkeypatch, server), "clock").level == level


def test_a_server_that_is_not_there_is_one_error(made: Folders) -> None:
    seen = [finding for finding in check_site(made.site("archive").path) if finding.level == "error"]
    assert [finding.what for finding in seen] == ["server"]
    assert f"localhost:{made.address.port} is not reached" in seen[0].detail


@pytest.mark.slow
def test_a_live_server_passes_and_a_foreign_one_does_not(live: Live, fresh: Folders) -> None:
    seen = list(check_site(live.folders.site("archive").path))
    assert not failed(seen), errors(seen)
    assert the(seen, "control plane").level == the(seen, "clock").level == the(seen, "server").level == "ok"
    assert the(seen, "admission").level == "ok"
    assert "valid for 7" in the(seen, "server certificate").detail  # 730 days
    stranger = fresh.site("archive")  # of another authority
    edit(stranger.connection, server=f"localhost:{live.folders.address.port}")
    assert "does not present a certificate that ca.crt signed" in errors(list(check_site(stranger.path)))


@pytest.mark.slow
def test_superlink_without_its_gate_is_an_open_control_plane(live: Live, tmp_path: Path) -> None:
    folder = shutil.copytree(live.folders.site("archive").path, tmp_path / "archive")
    edit(folder / "connection.yaml", server=f"localhost:{live.folders.address.superlink_port}")
    assert "CONTROL PLANE" in errors(list(check_site(folder)))


def test_an_unreadable_authority_is_named(tmp_path: Path) -> None:
    from polyfed.deploy.check_network import ask

    with pytest.raises(RunError, match=r"ca\.crt' is not a readable certificate"):
        ask("localhost", 1, "/", tmp_path / "ca.crt")


# ---- the commands


def test_commands_from_init_to_check(tmp_path: Path, made: Folders) -> None:
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(experiment_settings()))
    run, folder = CliRunner(), tmp_path / "f"
    result = run.invoke(app, ["init", str(tmp_path / "e.yaml"), str(folder), "--host", "localhost"])
    assert result.exit_code == 0, result.output
    assert f"server: {folder / 'server'}\nsite: {folder / 'archive'}\nsite: {folder / 'hospital'}\n" in result.output
    key = run.invoke(app, ["key", str(folder / "archive")])
    admitted = run.invoke(app, ["admit", str(folder / "server"), "archive", str(folder / "archive" / "node.pub")])
    print_of_key = key.output.rpartition("fingerprint: ")[2].strip()
    assert f"admitted: archive ({print_of_key})" in admitted.output
    assert (folder / "server" / "sites" / "archive.pub").is_file()
    assert "localhost" in run.invoke(app, ["renew", str(folder / "server")]).output
    checked = run.invoke(app, ["check", str(folder / "archive"), "--no-network", "--json"])
    assert checked.exit_code == 0, checked.output
    assert {entry["level"] for entry in json.loads(checked.output)} == {"ok"}
    failing = run.invoke(app, ["check", str(folder / "hospital"), "--no-network"])
    assert failing.exit_code == 2
    assert "error   node key: " in failing.output
