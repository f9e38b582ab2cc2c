"""The authority and the server certificate, judged by OpenSSL through Python's ssl."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from federations import hosts_of

from polyfed.core.errors import ConfigError, RunError
from polyfed.deploy.folders import Identity, create_authority, days_left, issue_server, read_certificate, write_new

AUTHORITY = create_authority("test")


def handshake(tmp_path: Path, identity: Identity, trusted: bytes, host: str) -> None:
    """Connect to a server with this identity, as a client that trusts one authority."""
    certificate, key = write_new(tmp_path / "s.crt", identity.certificate), write_new(tmp_path / "s.key", identity.key)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, key)
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            with served.wrap_socket(there, server_side=True) as connection:
                connection.recv(1)
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        context = ssl.create_default_context(cadata=trusted.decode())
        with context.wrap_socket(here, server_hostname=host) as connection:
            connection.send(b".")
    finally:
        here.close()
        thread.join(10)


@pytest.mark.parametrize("host", ["fl.example.org", "192.0.2.7", "2001:db8::7", "localhost", "127.0.0.1"])
def test_a_client_of_the_authority_accepts_the_server_under_every_name(tmp_path: Path, host: str) -> None:
    identity = issue_server(AUTHORITY, ["fl.example.org", "192.0.2.7", "2001:db8::7"])
    handshake(tmp_path, identity, AUTHORITY.certificate, host)


@pytest.mark.parametrize(
    ("host", "days", "trusted", "message"),
    [
        ("other.example.org", 10, AUTHORITY, r"other\.example\.org"),
        ("a.example.org", 10, create_authority("x"), "self-signed certificate|unable to get local issuer"),
        ("a.example.org", 0, AUTHORITY, "expired"),
    ],
    ids=["another name", "another authority", "expired"],
)
def test_another_server_is_refused(tmp_path: Path, host: str, days: int, trusted: Identity, message: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=message):
        handshake(tmp_path, issue_server(AUTHORITY, ["a.example.org"], days=days), trusted.certificate, host)


def test_a_server_certificate_signs_nothing(tmp_path: Path) -> None:
    server = issue_server(AUTHORITY, ["a.example.org"])
    below = issue_server(server, ["b.example.org"])
    chain = Identity(below.certificate + server.certificate, below.key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, chain, AUTHORITY.certificate, "b.example.org")


def test_lifetimes_and_names_are_read_back(tmp_path: Path) -> None:
    path = write_new(tmp_path / "s.crt", issue_server(AUTHORITY, ["a.example.org"], days=10).certificate)
    certificate = read_certificate(path)
    assert hosts_of(certificate) == ("a.example.org", "localhost", "127.0.0.1")
    assert days_left(certificate) == pytest.approx(10, abs=0.01)
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc > timedelta(days=10)


@pytest.mark.parametrize("host", ["https://a.example.org", "a.example.org:9443", "a b", "", "bücher.example", None])
def test_a_wrong_host_is_named(host: str | None) -> None:
    with pytest.raises(ConfigError, match="needs a host" if host is None else "neither a name nor an address"):
        issue_server(AUTHORITY, [] if host is None else [host])


def test_a_key_of_another_authority_is_found_out() -> None:
    mixed = Identity(AUTHORITY.certificate, create_authority("x").key)
    with pytest.raises(RunError, match=r"ca\.key does not belong to ca\.crt"):
        issue_server(mixed, ["a.example.org"])
    with pytest.raises(RunError, match="damaged"):
        issue_server(Identity(AUTHORITY.certificate, b"nonsense"), ["a.example.org"])


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read certificate .*absent\.crt"):
        read_certificate(tmp_path / "absent.crt")
    path = write_new(tmp_path / "bad.crt", "nonsense")
    with pytest.raises(RunError, match=r"bad\.crt' is not a PEM certificate"):
        read_certificate(path)
