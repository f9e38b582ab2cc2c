"""A client's side of secure sums at its site: what it keeps between the phases of a round, and never sends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.core.files import private_files, write_atomically
from polyfed.privacy.masking.summed import TOTAL, SummedReply
from polyfed.privacy.secure_sum import SecureSum
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, TensorBundle

if TYPE_CHECKING:  # takes cryptography, which is no part of the base installation
    from polyfed.privacy.masking.party import Party, SiteIdentity


KEYS, SHARES, OPENING = "mask_keys", "mask_shares", "mask_opening"
"""What a server asks beside the method's step: public keys, shares of secrets for others, shares of others' secrets."""
MASKING = (KEYS, SHARES, OPENING)
SIGNED = "mask_signatures"
"""Field of replies to ``mask_keys`` and of requests for ``mask_shares``: client -> its site's signature of its keys."""
SEALED = "secure_shares"
"""Field of requests and replies: client -> sealed shares."""
REQUEST = "request_digest"
"""Field of a request for ``mask_keys``: ``request_digest`` of the step's request that is to come."""
_FILE = "masks.json"


def request_digest(step: str, payload: Payload) -> str:
    """SHA-256, in hexadecimal digits, of a step's name and of all that it is asked with but the sealed shares."""
    asked = Payload({name: value for name, value in payload.fields.items() if name != SEALED})
    return sha256(step.encode() + b"\0" + asked.digest).hexdigest()


def bytes_bundle(values: dict[str, bytes]) -> TensorBundle:
    return TensorBundle({name: torch.frombuffer(bytearray(value), dtype=torch.uint8) for name, value in values.items()})


def bytes_in(payload: Payload, field: str) -> dict[str, bytes]:
    """What ``bytes_bundle`` made.

    Raises:
        PayloadError: there is no such field, or it holds something else.
    """
    bundle = payload.bundles.get(field)
    if bundle is None or any(value.dtype != torch.uint8 or value.ndim != 1 for value in bundle.values()):
        raise PayloadError(f"'{field}' is not bytes by name")
    return {name: _bytes(value) for name, value in bundle.items()}


def _bytes(value: Tensor) -> bytes:
    array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = value.cpu().numpy()
    return array.tobytes()


def masking_replies() -> dict[str, str]:
    """Phase that is not the method's -> what a client answers, in words."""
    from polyfed.privacy.masking.party import PUBLIC_BYTES
    from polyfed.privacy.masking.shamir import SHARE_BYTES

    share = f"({SHARE_BYTES} bytes) for each client of its type"
    return {
        KEYS: f"public keys of the round, {PUBLIC_BYTES} bytes, signed by the site's key",
        SHARES: "shares of its secrets of the round, for each other client of its type, encrypted for that one",
        OPENING: f"a share {share}: of the mask of one that replied, of the key of one that did not",
    }


@dataclass(frozen=True)
class MaskKeeper:
    """Answers for the clients of a site in sums that the server must not see the terms of.

    Secrets are of the system's randomness, in a file that only the site's user reads; they are gone from it before the
    last answer of a sum leaves, and a new round, or the same one once more, begins with new keys.

    Attributes:
        rule: that holds; the threshold is the site's to check.
        run: fingerprint of the run's spec.
        terms: digest of the settings that decide replies, whatever the run is called.
        asks: step -> how often a round asks for it, where that is not once.
        folder: of clients' states.
        sums: folder of what was answered over all runs; None: beside the states of this run.
        identity: signs the clients' keys, and says whose signatures count; None: of a simulation, which has none.
    """

    rule: SecureSum
    run: str
    terms: str
    asks: Mapping[str, int]
    folder: Path
    sums: Path | None = None
    identity: SiteIdentity | None = None

    def answer(self, request: Request, received: Payload) -> Payload:
        """What a client answers in a phase that is not the method's.

        Raises:
            PayloadError: it refuses.
        """
        if not self.rule.masks:
            raise PayloadError(f"'{request.step}': this run masks nothing (aggregation.secure)")
        return {KEYS: self._keys, SHARES: self._shares, OPENING: self._opening}[request.step](request, received)

    def _keys(self, request: Request, received: Payload) -> Payload:
        from polyfed.privacy.masking.party import Party

        asked = received.scalars.get(REQUEST)
        if not isinstance(asked, str) or len(asked) != sha256().digest_size * 2:
            raise PayloadError(f"'{KEYS}' without {REQUEST}: keys of a masked sum are for one request")
        self._answered(request).require_same(_ask(request), AnsweredSum(asked))
        party = Party(request.client, self._context(request, asked))
        self._save(party)
        fields = {KEYS: bytes_bundle({request.client: party.public})}
        if self.identity is not None:
            signature = self.identity.signature(request.client, party.context, party.public)
            fields[SIGNED] = bytes_bundle({request.client: signature})
        return Payload(fields)

    def _shares(self, request: Request, received: Payload) -> Payload:
        party, members = self._party(request), bytes_in(received, KEYS)
        if self.identity is not None:
            signatures = bytes_in(received, SIGNED) if SIGNED in received.fields else {}
            self.identity.require_signed(members, signatures, party.context)
        self._answered(request).require_same(_ask(request), AnsweredSum(_asked(party), sorted(members)))
        made = party.shares(members, self.rule.required)
        self._save(party)
        return Payload({SEALED: bytes_bundle(made)})

    def _opening(self, request: Request, received: Payload) -> Payload:
        party, survivors = self._party(request), bytes_in(received, OPENING)
        answered, asked = self._answered(request), _asked(party)
        members, arrived = sorted(party.members), sorted(survivors)
        answered.require_same(_ask(request), AnsweredSum(asked, members, arrived))
        told = party.opened(survivors, self.rule.required)
        # before anything is told: what was told once must not be told for other survivors
        if members:
            answered.record(_ask(request), AnsweredSum(asked, members, arrived))
        self._save(party)
        return Payload({OPENING: bytes_bundle(told)})

    def prepared(
        self, request: Request, received: Payload, by: str | None
    ) -> tuple[Payload, Callable[[Payload], Payload]]:
        """A request without what is about sums, and what lays out and masks the reply; ``by`` names its weight.

        Raises:
            PayloadError: the request is for a reply in the clear, or its masks are not as they must be.
        """
        total, fields = received.scalars.get(TOTAL), dict(received.fields)
        if not isinstance(total, int) or total < 1:
            raise PayloadError(f"'{request.step}' without {TOTAL}: in this run no reply goes out in the clear")
        del fields[TOTAL]
        party = None
        if self.rule.masks:
            party = self._party(request)
            if request_digest(request.step, request.payload) != _asked(party):
                raise PayloadError(
                    f"'{request.step}' asks something else than was announced when this client made its keys; "
                    "with clients who are asked something else its masks do not cancel"
                )
            self._answered(request).require_same(_ask(request), self._sum(request, party))
            party.receive(bytes_in(received, SEALED), self.rule.required)
            del fields[SEALED]

        def masked(content: Payload) -> Payload:
            reply = SummedReply.of(content, by, total, self.rule.numbers)
            if party is None:
                return reply.payload()
            words = party.masked(reply.words)
            # masks are for one vector: a second one under them would give the difference away
            self._answered(request).record(_ask(request), self._sum(request, party))
            self._save(party)
            return SummedReply(words, reply.layout).payload()

        return Payload(fields), masked

    # ---- between phases

    def _context(self, request: Request, asked: str) -> bytes:
        from polyfed.privacy.masking.party import context_of

        return context_of(self.run, *_ask(request), asked)

    def _answered(self, request: Request) -> AnsweredSums:
        return AnsweredSums((self.sums or self.folder) / request.client, self.terms, self.asks)

    @staticmethod
    def _sum(request: Request, party: Party) -> AnsweredSum:
        return AnsweredSum(_asked(party), sorted(party.members), step=request.step)

    def _path(self, client: str) -> Path:
        return self.folder / client / _FILE

    def _party(self, request: Request) -> Party:
        from polyfed.privacy.masking.party import Party

        try:
            party = Party.from_json(self._path(request.client).read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PayloadError("there are no keys of this sum here; they are made anew each round") from error
        if party.context != self._context(request, _asked(party)):
            raise PayloadError("the keys here are of another round or step; they are made anew each round")
        return party

    def _save(self, party: Party) -> None:
        with private_files():
            write_atomically(self._path(party.name), party.to_json().encode())


def _ask(request: Request) -> tuple[int, int]:
    return request.round, request.phase


def _asked(party: Party) -> str:
    return str(json.loads(party.context)[-1])


FILE = "answered-sums.json"
"""Of one client, over all runs that share the folder; without it, its site answers as if nothing had been sent."""


@dataclass(frozen=True)
class AnsweredSum:
    """A sum for which masked words were sent.

    Attributes:
        request: digest of what was asked.
        members: whose keys were exchanged, sorted; empty: none were yet.
        survivors: for whom shares were told, sorted; empty: none were told.
        step: of the method; empty: of a record that does not say.
    """

    request: str
    members: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)
    step: str = ""


@dataclass(frozen=True)
class AnsweredSums:
    """The sums of one client, by settings of the run, round and ask.

    Attributes:
        folder: of the record.
        terms: digest of the settings that decide replies, whatever the run is called.
        asks: step -> how often a round asks for it, where that is not once.
    """

    folder: Path
    terms: str
    asks: Mapping[str, int] = field(default_factory=dict)

    def require_same(self, ask: tuple[int, int], asked: AnsweredSum) -> None:
        """Check that the ask was not answered before for another request, nor any ask of its round for others.

        Args:
            ask: round and ask.
            asked: what is asked now; members, survivors and step are empty while they are not known.

        Raises:
            PayloadError: it was, in this run or in another one with these settings; the round has had all asks for this
                step; or the record is damaged.
        """
        self._require_same(self._load(), ask, asked)

    def record(self, ask: tuple[int, int], answered: AnsweredSum) -> None:
        """Write a sum down; it is on the disk when this returns.

        Raises:
            PayloadError: as ``require_same``, also for what another run has recorded meanwhile.
        """
        with private_files():
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.folder / f"{FILE}.lock"):
                known = dict(self._load())
                self._require_same(known, ask, answered)
                before = known.get(self._key(ask))
                if before is not None:
                    survivors, step = answered.survivors or before.survivors, answered.step or before.step
                    answered = replace(answered, survivors=survivors, step=step)
                known[self._key(ask)] = answered
                if answered != before:
                    content = json.dumps({key: asdict(one) for key, one in known.items()})
                    write_atomically(self.folder / FILE, content.encode())

    def _require_same(self, known: Mapping[str, AnsweredSum], ask: tuple[int, int], asked: AnsweredSum) -> None:
        own, same_round = self._key(ask), self._key((ask[0], 0))[:-1]
        of_round = {key: before for key, before in known.items() if key.startswith(same_round)}  # as they were answered
        if own in known:
            _require_alike(ask, known[own], asked)
        elif asked.step:
            most, had = self.asks.get(asked.step, 1), sum(one.step in ("", asked.step) for one in of_round.values())
            if had >= most:
                times = "once" if most == 1 else f"{most} times"
                raise PayloadError(
                    f"ask {ask[1]} of round {ask[0]}: a round asks for '{asked.step}' {times}, which this client has "
                    "answered; a method that asks more often says so in its 'asks'"
                )
        if of_round and own != next(iter(of_round)):
            first = next(iter(of_round.values()))
            left = first.survivors or first.members
            _require_alike(ask, AnsweredSum(asked.request, left, left), asked)

    def _key(self, ask: tuple[int, int]) -> str:
        return f"{self.terms}.{ask[0]}.{ask[1]}"

    def _load(self) -> Mapping[str, AnsweredSum]:
        path = self.folder / FILE
        if not path.is_file():
            return {}
        try:
            return {key: AnsweredSum(**entry) for key, entry in json.loads(path.read_bytes()).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise PayloadError(f"'{FILE}' is damaged, so nobody knows which sums this client has answered") from error


def _require_alike(ask: tuple[int, int], before: AnsweredSum, now: AnsweredSum) -> None:
    pairs = [(before.members, now.members), (before.survivors, now.survivors)]
    others = next(((then, here) for then, here in pairs if then and here and then != here), None)
    if before.request == now.request and others is None:
        return
    instead = "another request" if others is None else f"{', '.join(others[0])}, not {', '.join(others[1])}"
    raise PayloadError(
        f"ask {ask[1]} of round {ask[0]} was answered here for {instead}; two sums would tell what one client sent. "
        f"a run begun anew needs another run.seed; who operates the site can allow this one: remove '{FILE}' of the "
        "client"
    )
