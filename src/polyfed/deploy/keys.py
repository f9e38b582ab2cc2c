"""Node keys: the ECDSA pair that a site proves itself with, in OpenSSH format as Flower reads it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.core.errors import RunError
from polyfed.deploy.files import SiteFolder, require_file, write_new

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def create_keys(folder: Path, comment: str = "") -> Path:
    """Make ``node.key`` (readable by its owner alone) and ``node.pub`` in a site's folder; the path of the latter.

    Raises:
        RunError: there is a pair already, or the folder cannot be written to.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    site = SiteFolder(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    for path in (site.key, site.public_key):
        if path.exists():
            raise RunError(f"'{path}' is there already; move it away if the site is to have a new key")
    write_new(site.key, secret, secret=True)
    return write_new(site.public_key, f"{_public_text(key)} {comment}".rstrip() + "\n")


def public_half(private: Path) -> str:
    """The public key, as one OpenSSH line without a comment, that belongs to a private key file.

    Raises:
        RunError: not there, or not an unencrypted ECDSA key in OpenSSH format.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    require_file(private, "the site's private key; make it with: polyfed deploy key FOLDER")
    try:
        key = load_ssh_private_key(private.read_bytes(), None)
    except OSError as error:
        raise RunError(f"cannot read the private key '{private}': {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise RunError(f"'{private}' is not an unencrypted OpenSSH key: {error}") from error
    if not isinstance(key, EllipticCurvePrivateKey):
        raise RunError(f"'{private}' is not an ECDSA key; make one with: polyfed deploy key FOLDER")
    return _public_text(key)


def read_public(path: Path) -> str:
    """The public key of a ``.pub`` file, as one OpenSSH line without its comment.

    Raises:
        RunError: not there, or not an ECDSA public key.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    require_file(path, "a site's public key; the site makes it with: polyfed deploy key FOLDER")
    try:
        content = path.read_bytes()
        key = load_ssh_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise RunError(f"'{path}' is not an OpenSSH public key: {error}") from error
    if not isinstance(key, EllipticCurvePublicKey):
        raise RunError(f"'{path}' is not an ECDSA public key; the site makes one with: polyfed deploy key FOLDER")
    return " ".join(content.decode().split()[:2])


def _public_text(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives import serialization

    encoded = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return encoded.decode()
