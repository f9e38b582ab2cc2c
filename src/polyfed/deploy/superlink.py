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


class SecretPlugin(NoOpControlAuthnPlugin):
    """Account of whoever sends the secret; of nobody else, and none can be had in another way.

    Args:
        secret: at least a few random bytes.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Whether the token in a request is the secret."""
        token = dict(metadata).get(ACCESS_TOKEN_KEY, "")
        given = token.encode() if isinstance(token, str) else token
        return super().validate_tokens_in_metadata(metadata) if compare_digest(given, self._secret) else (False, None)

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        """Nothing: a secret has no successor."""
        return None, None


def serve_superlink(secret: Path) -> None:
    """``python -m polyfed.deploy.superlink SECRET ...``: SuperLink with the rest of the command line."""
    program = import_module("flwr.superlink.cli.flower_superlink")  # of which the package's attribute is a function
    vars(program)["load_control_authn_plugin"] = lambda: SecretPlugin(secret.read_text(encoding="utf-8"))
    program.flower_superlink()


if __name__ == "__main__":
    serve_superlink(Path(sys.argv.pop(1)))
