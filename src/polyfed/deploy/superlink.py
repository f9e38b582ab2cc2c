"""SuperLink whose control interface requires a credential: the secret in a file of the server's folder.

Flower supports such a check, but not on its command line.
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
    """Account of a sender of the secret, which SuperLink does not hand out.

    Args:
        secret: Random bytes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def validate_tokens_in_metadata(self, metadata: _Headers) -> tuple[bool, AccountInfo | None]:
        """True with the account if the token of a request is the secret."""
        token = str(dict(metadata).get(ACCESS_TOKEN_KEY, "")).encode()
        return super().validate_tokens_in_metadata(metadata) if compare_digest(token, self._secret) else (False, None)

    def refresh_tokens(self, metadata: _Headers) -> tuple[None, None]:
        """Refuse new tokens: Flower's own plugin issues them to any sender."""
        return None, None


def serve_superlink(secret: Path) -> None:
    """``python -m polyfed.deploy.superlink SECRET ...``: SuperLink with the other arguments."""
    program = import_module("flwr.superlink.cli.flower_superlink")  # the package's attribute of this name is a function
    vars(program)["load_control_authn_plugin"] = lambda: SecretPlugin(secret.read_bytes())
    program.flower_superlink()


if __name__ == "__main__":
    serve_superlink(Path(sys.argv.pop(1)))
