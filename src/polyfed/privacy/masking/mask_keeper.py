"""A client's side of masked sums at its site: the secrets kept between the phases of a round, which never leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polyfed.core.errors import PayloadError
from polyfed.core.files import private_files, write_atomically
from polyfed.privacy.answered import AnsweredAsk, AnsweredAsks
from polyfed.privacy.secure_sum import TOTAL, SecureSum, SummedReply
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, TensorBundle

if TYPE_CHECKING:  # imports cryptography, which the base installation lacks
    from polyfed.privacy.masking.party import Party, SiteIdentity


KEYS, SHARES, OPENING = "mask_keys", "mask_shares", "mask_opening"
"""Phases of a masked sum in addition to the method's step: public keys, shares for others, shares of others."""
MASKING = (KEYS, SHARES, OPENING)
SIGNED = "mask_signatures"
"""Field of replies to ``mask_keys`` and of requests for ``mask_shares``: client -> its site's signature of its keys."""
SEALED = "secure_shares"
"""Field of requests and replies: client -> sealed shares."""
REQUEST = "request_digest"
"""Field of a request for ``mask_keys``: ``request_digest`` of the step's request that follows."""
_FILE = "masks.json"


def request_digest(step: str, payload: Payload) -> str:
    """SHA-256, in hexadecimal digits, of a step's name and its request's payload without the sealed shares."""
    asked = Payload({name: value for name, value in payload.fields.items() if name != SEALED})
    return sha256(step.encode() + b"\0" + asked.digest).hexdigest()


def bytes_bundle(values: dict[str, bytes]) -> TensorBundle:
    return TensorBundle({name: torch.frombuffer(bytearray(value), dtype=torch.uint8) for name, value in values.items()})


def bytes_in(payload: Payload, field: str) -> dict[str, bytes]:
    """Values of a field that ``bytes_bundle`` made.

    Raises:
        PayloadError: the field is missing, or holds something else.
    """
    bundle = payload.bundles.get(field)
    if bundle is None or any(value.dtype != torch.uint8 or value.ndim != 1 for value in bundle.values()):
        raise PayloadError(f"'{field}' is not bytes by name")
    return {name: value.cpu().numpy().tobytes() for name, value in bundle.items()}


def masking_replies() -> dict[str, str]:
    """Description of a client's reply in each phase of the masking."""
    from polyfed.privacy.masking.keys import SHARE_BYTES
    from polyfed.privacy.masking.party import PUBLIC_BYTES

    share = f"({SHARE_BYTES} bytes) for each client of its type"
    return {
        KEYS: f"public keys of the round, {PUBLIC_BYTES} bytes, signed by the site's key",
        SHARES: "shares of its secrets of the round, for each other client of its type, encrypted for that one",
        OPENING: f"a share {share}: of the mask of one that replied, of the key of one that did not",
    }


@dataclass(frozen=True)
class MaskKeeper:
    """Answers for the clients of a site in sums whose terms the server must not see.

    Secrets come from the system's randomness and lie in a file that only the site's user can read. They are deleted
    before the last answer of a sum leaves; a new round, or a repeated one, begins with new keys.

    Attributes:
        rule: Settings of the masked sum in force.
        run: Fingerprint of the run's spec.
        account: Account of the asks that the clients have answered.
        folder: Folder of the clients' states.
        identity: Signing key of the site and the signatures it trusts; None in simulations.
    """

    rule: SecureSum
    run: str
    account: AnsweredAsks
    folder: Path
    identity: SiteIdentity | None = None

    def answer(self, request: Request) -> Payload:
        """A client's reply in a phase of the masking.

        Raises:
            PayloadError: the client refuses.
        """
        if not self.rule.masks:
            raise PayloadError(f"'{request.step}': this run masks nothing (aggregation.secure)")
        return {KEYS: self._keys, SHARES: self._shares, OPENING: self._opening}[request.step](request)

    def _keys(self, request: Request) -> Payload:
        from polyfed.privacy.masking.party import Party

        asked = request.payload.scalars.get(REQUEST)
        if not isinstance(asked, str) or len(asked) != sha256().digest_size * 2:
            raise PayloadError(f"'{KEYS}' without {REQUEST}: keys of a masked sum are for one request")
        self.account.require_same(request, AnsweredAsk(asked))
        party = Party(request.client, self._context(request, asked))
        self._save(party)
        fields = {KEYS: bytes_bundle({request.client: party.public})}
        if self.identity is not None:
            signature = self.identity.signature(request.client, party.context, party.public)
            fields[SIGNED] = bytes_bundle({request.client: signature})
        return Payload(fields)

    def _shares(self, request: Request) -> Payload:
        party, members = self._party(request), bytes_in(request.payload, KEYS)
        if self.identity is not None:
            signatures = bytes_in(request.payload, SIGNED) if SIGNED in request.payload.fields else {}
            self.identity.require_signed(members, signatures, party.context)
        self.account.require_same(request, AnsweredAsk(_asked(party), sorted(members)))
        made = party.shares(members, self.rule.required)
        self._save(party)
        return Payload({SEALED: bytes_bundle(made)})

    def _opening(self, request: Request) -> Payload:
        party, survivors = self._party(request), bytes_in(request.payload, OPENING)
        members = sorted(party.members)
        ask = AnsweredAsk(_asked(party), members, sorted(survivors))
        self.account.require_same(request, ask)
        shares = party.opened(survivors, self.rule.required)
        if members:  # recorded before any share leaves: shares for other survivors would unmask a client
            self.account.record(request, ask)
        self._save(party)
        return Payload({OPENING: bytes_bundle(shares)})

    def prepared(
        self, request: Request, received: Payload, by: str | None
    ) -> tuple[Payload, Callable[[Payload], Payload], list[str]]:
        """The request without the fields of the sum, the filter that masks the reply, and the members of the sum.

        Masks are for one vector, as a second one under them would reveal the difference: the caller puts the ask on
        the account before the step begins. ``by`` names the reply's weight.

        Raises:
            PayloadError: the request is for a reply in the clear, or its masks are not as they must be.
        """
        total, fields = received.scalars.get(TOTAL), dict(received.fields)
        if not isinstance(total, int) or total < 1:
            raise PayloadError(f"'{request.step}' without {TOTAL}: in this run no reply goes out in the clear")
        del fields[TOTAL]
        party, members = None, list[str]()
        if self.rule.masks:
            party = self._party(request)
            if request_digest(request.step, request.payload) != _asked(party):
                what = f"'{request.step}' asks something else than was announced when this client made its keys"
                raise PayloadError(f"{what}; with clients who are asked something else its masks do not cancel")
            members = sorted(party.members)
            self.account.require_same(request, AnsweredAsk(_asked(party), members, step=request.step))
            party.receive(bytes_in(received, SEALED), self.rule.required)
            del fields[SEALED]

        def masked(content: Payload) -> Payload:
            reply = SummedReply.of(content, by, total, self.rule.numbers)
            if party is None:
                return reply.payload()
            words = party.masked(reply.words)
            self._save(party)
            return SummedReply(words, reply.layout).payload()

        return Payload(fields), masked, members

    def _context(self, request: Request, asked: str) -> bytes:
        from polyfed.privacy.masking.party import context_of

        return context_of(self.run, request.round, request.phase, asked)

    def _path(self, client: str) -> Path:
        return self.folder / client / _FILE

    def _party(self, request: Request) -> Party:
        from polyfed.privacy.masking.party import Party

        try:
            party = Party.from_json(self._path(request.client).read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PayloadError("keys of this sum are missing here; they are made anew each round") from error
        if party.context != self._context(request, _asked(party)):
            raise PayloadError("the keys here are of another round or step; they are made anew each round")
        return party

    def _save(self, party: Party) -> None:
        with private_files():
            write_atomically(self._path(party.name), party.to_json().encode())


def _asked(party: Party) -> str:
    return str(json.loads(party.context)[-1])
