"""``polyfed deploy server`` and ``polyfed deploy site`` as processes: admission, restarts, an end without remains."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from federations import MARK, Folders, Live, Started, make, marked, started, wait_until

from polyfed.core.errors import ConfigError, RunError
from polyfed.deploy import serve
from polyfed.deploy.folders import ServerFolder, create_keys
from polyfed.deploy.init import admit_site

real = pytest.mark.slow


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Marks all processes of a test; none of them may be left."""
    mark = uuid.uuid4().hex
    yield {MARK: mark}
    wait_until(lambda: not marked(mark), 10, lambda: f"left: {marked(mark)}")


@real
def test_a_key_is_admitted_and_expelled_while_the_server_runs(live: Live, tmp_path: Path) -> None:
    path = admit_site(live.folders.server.path, "clinic", create_keys(tmp_path / "clinic"))
    live.process.wait_for("admitted: clinic (SHA256:", 30)
    assert len(live.folders.link.nodes()) == 3
    path.unlink()
    live.process.wait_for("expelled: clinic", 30)
    assert len(live.folders.link.nodes()) == 2


@real
def test_a_file_without_a_key_is_reported_once_and_does_no_harm(live: Live) -> None:
    path = live.folders.server.sites / "broken.pub"
    path.write_text("nonsense")
    live.process.wait_for("not an OpenSSH public key", 30)
    path.write_text("nonsense")
    other = live.folders.server.sites / "other.pub"
    other.write_text("nonsense")
    live.process.wait_for("other.pub' is not an OpenSSH public key", 30)
    path.unlink()
    other.unlink()
    assert live.process.output.count("broken.pub' is not") == 1
    assert live.process.process.poll() is None


@real
def test_a_site_waits_for_its_admission_and_for_a_new_server_until_it_is_expelled(
    fresh: Folders, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Without a hand at the site."""
    key = fresh.server.sites / "archive.pub"
    text = key.read_text()
    key.unlink()
    server, site = str(fresh.server.path), str(fresh.site("archive").path)
    with started("site", site, log=tmp_path / "site.log", environment=environment) as attended:
        with started("server", server, log=tmp_path / "one.log", environment=environment) as first:
            first.wait_for("open for sites")
            attended.wait_for("Exit Code: 305", 60)  # not admitted
            key.write_text(text)
            attended.wait_for("connected to", 90)
            superlink = next(pid for pid in _children(first.process.pid) if "deploy.superlink" in _name(pid))
            os.kill(superlink, signal.SIGKILL)
            assert first.process.wait(40) == 1
            assert "SuperLink ended with exit code -9" in first.output
        with started("server", server, log=tmp_path / "two.log", environment=environment) as second:
            second.wait_for("admitted: archive", 60)
            attended.wait_for("connected to", 150, times=2)
            before = _ended(attended)
            key.unlink()
            second.wait_for("expelled: archive", 30)
            wait_until(lambda: _ended(attended) > before, 60, lambda: attended.output)  # by the server's refusal
            key.write_text(text)
            second.wait_for("archive.pub was expelled; give the site a new key", 30)
            assert fresh.link.nodes()[1:] == []
            assert second.stop() == 0
        assert attended.stop() == 0
    assert "stopped" in attended.output


def _ended(attended: Started) -> int:
    return attended.output.count("connection ended after")


def _children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@real
def test_a_gate_that_cannot_listen_ends_the_server(fresh: Folders, tmp_path: Path, environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", fresh.address.port))
        taken.listen()
        with started("server", str(fresh.server.path), log=tmp_path / "log", environment=environment) as server:
            assert server.process.wait(60) == 1
            assert "gate ended with exit code 1" in server.output
            assert "address already in use" in server.output


@real
def test_a_superlink_that_cannot_start_is_an_error(fresh: Folders, tmp_path: Path, environment: dict[str, str]) -> None:
    fresh.server.identity[1].write_text("nonsense")
    with started("server", str(fresh.server.path), log=tmp_path / "log", environment=environment) as server:
        assert server.process.wait(60) != 0
        assert "SuperLink ended with exit code 1 at its start" in server.output


# ---- what is found out before anything is started


def test_a_server_folder_must_be_complete(tmp_path: Path) -> None:
    folders = make(tmp_path / "f")
    folders.server.identity[0].unlink()
    with pytest.raises(RunError, match=r"server\.crt' is missing: make the folder with: polyfed deploy init"):
        serve.run_server(folders.server.path, print)
    with pytest.raises(ConfigError, match=r"server\.yaml"):
        serve.run_server(tmp_path, print)


def test_a_site_folder_must_be_complete(fresh: Folders) -> None:
    site = fresh.site("archive")
    for spoil, message in (
        (lambda: site.key.chmod(0o644), "chmod 600"),
        (site.key.unlink, r"node\.key' is missing.*polyfed deploy key"),
        (site.authority.unlink, r"ca\.crt' is missing"),
        (lambda: site.config.write_text("nonsense: 1\n"), "unknown key 'nonsense'"),
    ):
        spoil()
        with pytest.raises((RunError, ConfigError), match=message):
            serve.run_site(site.path, print)


def test_pauses_grow_and_a_signal_ends_them(fresh: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = ["sh", "-c", "exit 1"]
    monkeypatch.setattr(serve, "site_commands", lambda *a: {"worker": ending, "connection": ending})
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if line.endswith("again in 0.04 s"):
            os.kill(os.getpid(), signal.SIGTERM)

    assert serve.run_site(fresh.site("archive").path, report, first_pause=0.01) == 0
    assert [line.rpartition(" in ")[2] for line in lines if "ended" in line] == ["0.01 s", "0.02 s", "0.04 s"]
    assert lines[-1] == "stopped"


class FakeLink:
    """Registrations without SuperLink; refuses names in ``refused``."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}
        self.refused: set[str] = set()

    def register(self, path: Path) -> int:
        if path.stem in self.refused:
            raise RunError(f"{path.stem} refused")
        self.known[len(self.known) + 7] = path.stem
        return len(self.known) + 6

    def unregister(self, node: int) -> None:
        del self.known[node]


@pytest.fixture
def fake() -> Any:
    return FakeLink()


def refreshed(admissions: serve.Admissions, fake: Any) -> list[str]:
    """Names that are registered once the folder has been looked at."""
    admissions.refresh()
    return [*fake.known.values()]


def test_admissions_follow_the_folder(tmp_path: Path, fake: Any) -> None:
    server, lines = ServerFolder(tmp_path), list[str]()
    admissions = serve.Admissions(server.sites, fake, lines.append)
    for name in ("a", "b"):
        admit_site(tmp_path, name, create_keys(tmp_path / name))
    fake.refused = {"b"}
    assert refreshed(admissions, fake) == refreshed(admissions, fake) == ["a"]
    assert lines.count("warning: b refused") == 1
    fake.refused = set()
    assert refreshed(admissions, fake) == ["a", "b"]
    (server.sites / "a.pub").unlink()
    assert refreshed(admissions, fake) == ["b"]
    assert lines[-1] == "expelled: a"
    admit_site(tmp_path, "a", tmp_path / "a" / "node.pub")
    assert refreshed(admissions, fake) == ["b"]
    assert "a.pub was expelled" in lines[-1]


def test_one_key_under_two_names_is_admitted_once(tmp_path: Path, fake: Any) -> None:
    public = create_keys(tmp_path / "a")
    admissions = serve.Admissions(ServerFolder(tmp_path).sites, fake, lambda line: None)
    for name in ("one", "two"):
        admit_site(tmp_path, name, public)
    assert refreshed(admissions, fake) == ["one"]


def test_a_new_key_under_an_old_name_replaces_it(tmp_path: Path, fake: Any) -> None:
    admissions = serve.Admissions(ServerFolder(tmp_path).sites, fake, lambda line: None)
    path = admit_site(tmp_path, "a", create_keys(tmp_path / "old"))
    admissions.refresh()
    path.write_text(create_keys(tmp_path / "new").read_text())
    assert refreshed(admissions, fake) == ["a"]
    assert len(admissions.admitted) == 1
