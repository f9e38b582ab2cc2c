"""The federation's own certificate authority, and the server certificate that sites verify with it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS = 3650
SERVER_DAYS = 730
LOOPBACK = ("localhost", "127.0.0.1")
"""Names under which the gate and the operator's commands reach SuperLink on the server itself."""


@dataclass(frozen=True)
class Identity:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    key: bytes


def create_authority(name: str, days: int = AUTHORITY_DAYS) -> Identity:
    """A self-signed authority (EC P-256) that may sign certificates of servers and of nothing below them."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"{name} federation authority")
    builder = (
        _dated(x509.CertificateBuilder(), days)
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def issue_server(authority: Identity, hosts: Sequence[str], days: int = SERVER_DAYS) -> Identity:
    """A server certificate (EC P-256) for ``hosts``, which are names or addresses, and for the server's loopback.

    Raises:
        ConfigError: no host, or one that is neither a name nor an address.
        RunError: the authority's key or certificate is damaged.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    if not hosts:
        raise ConfigError("a server certificate needs a host; give the name or address under which sites reach it")
    issuer, issuer_key = _loaded(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_alternative(host) for host in dict.fromkeys((*hosts, *LOOPBACK))]
    builder = (
        _dated(x509.CertificateBuilder(), days)
        .subject_name(_name(hosts[0]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    return _signed(builder, key, issuer_key)


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file.

    Raises:
        RunError: not there, or not a certificate.
    """
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise RunError(f"cannot read certificate '{path}': {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"'{path}' is not a PEM certificate: {error}") from error


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Names and addresses that the certificate is valid for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)


def days_left(certificate: x509.Certificate) -> float:
    """Days until the certificate expires; negative once it has."""
    return (certificate.not_valid_after_utc - datetime.now(UTC)) / timedelta(days=1)


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

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


def _dated(builder: x509.CertificateBuilder, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    return (  # a clock of a site may be a little behind
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(**allowed: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign "
        "encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: allowed.get(name, False) for name in names.split()})


def _signed(
    builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey, signer: EllipticCurvePrivateKey
) -> Identity:
    from cryptography.hazmat.primitives import hashes, serialization

    pem = serialization.Encoding.PEM
    certificate = builder.sign(signer, hashes.SHA256())
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Identity(certificate.public_bytes(pem), secret)


def _loaded(identity: Identity) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        certificate = x509.load_pem_x509_certificate(identity.certificate)
        key = load_pem_private_key(identity.key, password=None)
    except (ValueError, TypeError) as error:
        raise RunError(f"the certificate authority's certificate or key is damaged: {error}") from error
    if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise RunError("ca.key does not belong to ca.crt; restore both from one backup")
    return certificate, key
