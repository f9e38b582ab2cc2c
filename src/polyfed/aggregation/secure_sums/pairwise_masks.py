"""Secure aggregation by pairwise masks."""

from __future__ import annotations

from importlib.util import find_spec

from polyfed.aggregation.secure_sum import SecureSum
from polyfed.core.errors import ConfigError
from polyfed.core.extras import how_to_install


class PairwiseMasks(SecureSum):
    """Masks that cancel in the sum, and one of each client's own (Bonawitz et al., CCS 2017, section 4 and figure 4).

    Client u sends x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv) modulo 2^k. The s_uv come of keys that
    the two agree on each round; of b_u and of u's key every client holds a share. t clients give the b of those who
    replied and the keys of those who did not, never both of one.
    """

    def require(self) -> None:
        """Check that the package with the ciphers is there.

        Raises:
            ConfigError: it is not.
        """
        if find_spec("cryptography") is None:
            raise ConfigError(
                "aggregation.secure 'pairwise_masks' needs the package 'cryptography', which is not installed; "
                f"{how_to_install('deploy')}"
            )
