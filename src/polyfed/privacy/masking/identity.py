"""Whose the keys of a round are: signed by the key that a site is known by, believed by a list that each site holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384

from polyfed.core.errors import PayloadError
from polyfed.privacy.masking.party import context_of

_SCHEME = ECDSA(SHA384())


def _statement(client: str, context: bytes, public: bytes) -> bytes:
    """What is signed; it begins with a bracket, as nothing does that Flower signs with the same key."""
    return context_of("mask keys", client, public.hex()) + context


@dataclass(frozen=True)
class SiteIdentity:
    """What a site shows that keys are its clients' with, and whose it believes.

    Attributes:
        key: the site's own, private.
        roster: client -> public key of the site that it lives at; None: keys of others are believed unsigned.
    """

    key: EllipticCurvePrivateKey = field(repr=False)
    roster: Mapping[str, EllipticCurvePublicKey] | None = None

    def signature(self, client: str, context: bytes, public: bytes) -> bytes:
        """What shows that a public half is that of a client of this site, in one sum.

        Args:
            client: its name.
            context: run, round, ask and request.
            public: both keys and the commitment.
        """
        return self.key.sign(_statement(client, context, public), _SCHEME)

    def require_signed(self, members: Mapping[str, bytes], signatures: Mapping[str, bytes], context: bytes) -> None:
        """Check that each client's site has signed its public half for this sum.

        Raises:
            PayloadError: naming the client whose site has not, or is not known.
        """
        if self.roster is None:
            return
        for client, public in members.items():
            if client not in self.roster:
                raise PayloadError(
                    f"keys of '{client}', whose site has no key on this site's roster; if it is of this federation: "
                    "polyfed deploy trust"
                )
            if client not in signatures:
                raise PayloadError(f"keys of '{client}' are not signed, and this site has a roster")
            try:
                self.roster[client].verify(signatures[client], _statement(client, context, public), _SCHEME)
            except InvalidSignature as error:
                raise PayloadError(
                    f"keys of '{client}' are not signed by its site for this round: they are another's, of another "
                    "round, were changed on the way, or its client was asked something else than this one"
                ) from error
