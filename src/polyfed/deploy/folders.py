"""Folders of a federation's server and sites: their files, node keys and certificates.

Node keys are ECDSA, in OpenSSH format, as Flower reads them; sites verify the server's certificate with that of the
federation's authority.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import sync_folder

SECRET_MODE = 0o600
_Key = ec.EllipticCurvePrivateKey


class ServerFolder:
    """Paths in the folder of the federation's server.

    Attributes:
        path: The folder.
        settings: Hosts and ports.
        experiment: The experiment that ``polyfed run`` trains over the sites.
        authority: Certificate and private key of the federation's certificate authority.
        identity: Certificate and private key of the server.
        secret: Credential that SuperLink requires to admit sites and start runs; next to the authority's certificate.
        gate: Configuration of the proxy in front of SuperLink.
        sites: Folder of the public keys of admitted sites: ``<name>.pub``.
        home: Flower's own folder, with the connection of its command line.
        logs: Access log of the gate and log of SuperLink.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings, self.experiment = path / "server.yaml", path / "experiment.yaml"
        self.authority = path / "ca.crt", path / "ca.key"
        self.identity = path / "server.crt", path / "server.key"
        self.secret = path / "control.secret"
        self.gate, self.sites = path / "Caddyfile", path / "sites"
        self.home, self.logs = path / "flower", path / "logs"


class SiteFolder:
    """Paths in the folder of a site.

    Attributes:
        path: The folder.
        config: Decisions of the site: paths of its data, and its limits.
        agreed: Settings agreed by all, which ``config`` extends: sources, public set, its clients and their models.
        connection: Address of the server.
        plan: The planned run, as the server's operator wrote it down.
        roster: Sites whose keys this one trusts, and their clients.
        authority: Certificate of the authority that signed the server's certificate.
        key: Private key of the site; it never leaves the folder.
        public_key: Public key for the server's operator.
        home: Flower's own folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.agreed = path / "site.yaml", path / "agreed.yaml"
        self.connection = path / "connection.yaml"
        self.plan, self.roster = path / "plan.yaml", path / "roster.yaml"
        self.authority = path / "ca.crt"
        self.key, self.public_key = path / "node.key", path / "node.pub"
        self.home = path / "flower"


def write_new(path: Path, content: str | bytes, *, secret: bool = False) -> Path:
    """Write a new file and flush it to disk; only its owner can read a secret, from the start.

    Raises:
        RunError: the file exists, or the folder cannot be written to.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder '{path.parent}': {error.strerror}") from error
    try:
        # with O_EXCL, for which a link is a file too, no other user can redirect the secret
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, SECRET_MODE if secret else 0o644)
    except FileExistsError as error:
        raise RunError(f"'{path}' exists already; move it away to make a new one") from error
    except OSError as error:
        raise RunError(f"cannot write '{path}': {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunError(f"cannot write '{path}': {error.strerror}") from error
    return path


def is_private(path: Path) -> bool:
    return not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def require_file(path: Path, purpose: str) -> Path:
    """The path, if it is a file.

    Raises:
        RunError: it is not; the message ends with ``purpose``, its use and origin.
    """
    if not path.is_file():
        raise RunError(f"'{path}' is missing: {purpose}")
    return path


AUTHORITY_DAYS = 3650
SERVER_DAYS = 730
LOOPBACK = ("localhost", "127.0.0.1")
"""Names of SuperLink for the gate and the operator's commands on the server itself."""

_ENCIPHERMENTS = ("key_encipherment", "data_encipherment", "encipher_only", "decipher_only")
_USAGES = ("digital_signature", "content_commitment", "key_agreement", "key_cert_sign", "crl_sign", *_ENCIPHERMENTS)


# ---- node keys


def create_keys(folder: Path, comment: str = "") -> Path:
    """Make ``node.key`` (readable by its owner only) and ``node.pub`` in a site's folder; returns the latter's path.

    Raises:
        RunError: one of the files exists, or the folder cannot be written to.
    """
    site, key = SiteFolder(folder), ec.generate_private_key(ec.SECP384R1())
    for path in (site.key, site.public_key):
        if path.exists():
            raise RunError(f"'{path}' exists already; move it away to make a new key")
    write_new(site.key, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), secret=True)
    return write_new(site.public_key, f"{_public_line(key)} {comment}".rstrip() + "\n")


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a site's file.

    Raises:
        RunError: the file is missing, or not an unencrypted ECDSA key in OpenSSH format.
    """
    require_file(path, "the site's private key; make it with: polyfed deploy key FOLDER")
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise RunError(f"cannot read the private key '{path}': {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RunError(f"'{path}' is not an unencrypted OpenSSH key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise RunError(f"'{path}' is not an ECDSA key; make one with: polyfed deploy key FOLDER")
    return key


def public_half(private: Path) -> str:
    """The public key of a private key file, as one OpenSSH line without a comment.

    Raises:
        RunError: see ``private_key``.
    """
    return _public_line(private_key(private))


def read_public(path: Path) -> str:
    """The public key of a ``.pub`` file, as one OpenSSH line without its comment.

    Raises:
        RunError: the file is missing, or not an ECDSA public key.
    """
    require_file(path, "a site's public key; the site makes it with: polyfed deploy key FOLDER")
    try:
        content = path.read_bytes()
        public_key(content, str(path))
    except OSError as error:
        raise RunError(f"cannot read the public key '{path}': {error.strerror}") from error
    except ValueError as error:
        raise RunError(str(error)) from error
    return " ".join(content.decode().split()[:2])


def public_key(line: bytes, what: str) -> ec.EllipticCurvePublicKey:
    """The key of an OpenSSH line.

    Raises:
        ValueError: it is not an ECDSA public key; the message begins with its origin ``what``.
    """
    try:
        key = load_ssh_public_key(line)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"'{what}' is not an OpenSSH public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"'{what}' is not an ECDSA public key; the site makes one with: polyfed deploy key FOLDER")
    return key


def _public_line(key: _Key) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


# ---- certificates


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def create_authority(name: str, days: int = AUTHORITY_DAYS) -> Identity:
    """A self-signed authority (EC P-256) that may sign certificates of servers only."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), _name(f"{name} federation authority")
    builder = (
        _builder(subject, subject, key, days, key_cert_sign=True, crl_sign=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def issue_server(authority: Identity, hosts: Sequence[str], days: int = SERVER_DAYS) -> Identity:
    """A server certificate (EC P-256) for ``hosts``, which are names or addresses, and for the server's loopback.

    Raises:
        ConfigError: the hosts are empty, or one is neither a name nor an address.
        RunError: the authority's key or certificate is damaged.
    """
    if not hosts:
        raise ConfigError("a server certificate needs a host; give the name or address under which sites reach it")
    try:
        issuer = x509.load_pem_x509_certificate(authority.certificate)
        issuer_key = load_pem_private_key(authority.key, password=None)
    except (ValueError, TypeError) as error:
        raise RunError(f"the certificate authority's certificate or key is damaged: {error}") from error
    if not isinstance(issuer_key, ec.EllipticCurvePrivateKey) or issuer_key.public_key() != issuer.public_key():
        raise RunError("ca.key does not belong to ca.crt; restore both from one backup")
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_alternative(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    builder = (
        _builder(_name(hosts[0]), issuer.subject, key, days, digital_signature=True)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    return _signed(builder, key, issuer_key)


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file.

    Raises:
        RunError: the file is missing, or not a certificate.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read certificate '{path}': {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"'{path}' is not a PEM certificate: {error}") from error


def days_left(certificate: x509.Certificate) -> float:
    """Days until the certificate expires; negative once it has."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # the longest that X.509 allows


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removesuffix(".").split(".")
    if not all(label and label.isascii() and label.replace("-", "").isalnum() for label in labels):
        raise ConfigError(
            f"host '{host}' is neither a name nor an address; give it as fl.example.org or 192.0.2.7, without a port"
        )
    return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: _Key, days: int, **usages: bool) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # a clock of a site may be a little behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.KeyUsage(**{name: usages.get(name, False) for name in _USAGES}), critical=True)
    )


def _signed(builder: x509.CertificateBuilder, key: _Key, signer: _Key) -> Identity:
    certificate = builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)
    return Identity(certificate, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def fingerprint(public: str) -> str:
    """Fingerprint of a public key, an OpenSSH line, as ``ssh-keygen -l`` shows it: to compare over the phone."""
    return "SHA256:" + b64encode(sha256(b64decode(public.split()[1])).digest()).decode().rstrip("=")


@lru_cache(maxsize=1024)
def fingerprint_of_pem(public: bytes) -> str:
    """Fingerprint of a public key in PEM, as SuperLink has it; empty for other content."""
    try:
        line = load_pem_public_key(public).public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    except (ValueError, UnsupportedAlgorithm):
        return ""
    return fingerprint(line.decode())
