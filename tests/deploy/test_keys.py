"""Node keys and files that only their owner may read."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from misbehaving import noted
from polyfed.core.errors import RunError
from polyfed.deploy.folders import create_keys, fingerprint, is_private, public_half, read_public, write_new


def test_a_pair_belongs_together_and_the_key_is_private(tmp_path: Path) -> None:
    public = create_keys(tmp_path, "hospital")
    assert public_half(tmp_path / "node.key") == read_public(public)
    assert public.read_text().split()[0] == "ecdsa-sha2-nistp384"
    assert public.read_text().split()[2] == "hospital"
    assert stat.S_IMODE((tmp_path / "node.key").stat().st_mode) == 0o600


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    create_keys(tmp_path)
    before = (tmp_path / "node.key").read_bytes()
    with pytest.raises(RunError, match="exists already"):
        create_keys(tmp_path)
    (tmp_path / "node.key").rename(tmp_path / "old.key")
    with pytest.raises(RunError, match=r"node\.pub' exists already"):
        create_keys(tmp_path)
    assert (tmp_path / "old.key").read_bytes() == before
    assert not (tmp_path / "node.key").exists()


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_the_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    public = create_keys(tmp_path)
    shown = subprocess.run(["ssh-keygen", "-l", "-f", public], capture_output=True, text=True, check=True).stdout
    assert fingerprint(read_public(public)) == shown.split()[1]


def test_a_file_without_a_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"node\.key' is missing.*polyfed deploy key"):
        public_half(tmp_path / "node.key")
    write_new(tmp_path / "node.key", "nonsense", secret=True)
    with pytest.raises(RunError, match="not an unencrypted OpenSSH key"):
        public_half(tmp_path / "node.key")
    write_new(tmp_path / "node.pub", "nonsense")
    with pytest.raises(RunError, match="not an OpenSSH public key"):
        read_public(tmp_path / "node.pub")


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    public = key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    with pytest.raises(RunError, match="not an ECDSA key"):
        public_half(write_new(tmp_path / "k", private, secret=True))
    with pytest.raises(RunError, match="not an ECDSA public key"):
        read_public(write_new(tmp_path / "p", public))


def test_files_are_new_and_secrets_private(tmp_path: Path) -> None:
    assert is_private(write_new(tmp_path / "a" / "secret", b"x", secret=True))
    assert not is_private(write_new(tmp_path / "open", "x"))
    with pytest.raises(RunError, match="exists already"):
        write_new(tmp_path / "open", "y")
    assert (tmp_path / "open").read_text() == "x"
    with pytest.raises(RunError, match="cannot make the folder"):
        write_new(tmp_path / "open" / "below", "y")


def test_keys_are_flushed_to_disk_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = noted(monkeypatch, os, "fsync", lambda file: str(Path(f"/proc/self/fd/{file}").readlink()))
    create_keys(tmp_path / "site")
    folder = tmp_path / "site"
    assert flushed == [str(folder / "node.key"), str(folder), str(folder / "node.pub"), str(folder)]
