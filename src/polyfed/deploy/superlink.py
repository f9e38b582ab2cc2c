"""SuperLink whose control interface wants a credential: the secret that is in a file of the server's folder.

Flower's own has room for such a check, and no way to name one on its command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hmac import compare_digest
from importlib import import_module
from pathlib import Path

from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.auth.typing import AccountInfo
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

_Headers = Sequence[tuple[str, str | bytes]]


class SecretPlugin(NoOpControlAuthnPlugin):
    """The account of whoever sends the secret, which cannot be had from SuperLink.

    Args:
        secret: a few random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def validate_tokens_in_metadata(self, metadata: _Headers) -> tuple[bool, AccountInfo | None]:
        """Whether the token of a request is the secret, and whose it is."""
        token = str(dict(metadata).get(ACCESS_TOKEN_KEY, "")).encode()
        return super().validate_tokens_in_metadata(metadata) if compare_digest(token, self._secret) else (False, None)

    def refresh_tokens(self, metadata: _Headers) -> tuple[None, None]:
        """None: Flower's own lets anybody in who asks for new tokens."""
        return None, None


def serve_superlink(secret: Path) -> None:
    """``python -m polyfed.deploy.superlink SECRET ...``: SuperLink with the rest of the command line."""
    program = import_module("flwr.superlink.cli.flower_superlink")  # of which the package's attribute is a function
    vars(program)["load_control_authn_plugin"] = lambda: SecretPlugin(secret.read_bytes())
    program.flower_superlink()


if __name__ == "__main__":
    serve_superlink(Path(sys.argv.pop(1)))
