"""Masked sums (Bonawitz et al., CCS 2017): one party at its site, its signed identity, and unmasking at the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA384

from polyfed.core.errors import PayloadError
from polyfed.privacy.masking import keys
from polyfed.privacy.secure_sum import FEWEST, Residues

PUBLIC_BYTES = 3 * keys.KEY_BYTES
"""A party's public half: key for shares, key for masks, commitment to the seed of its own mask."""
_FOR_SHARES, _FOR_MASKS, _COMMITMENT = (slice(k * keys.KEY_BYTES, (k + 1) * keys.KEY_BYTES) for k in range(3))


def context_of(*parts: str | int) -> bytes:
    return json.dumps(parts).encode()


def group_digest(members: Mapping[str, bytes]) -> bytes:
    """Digest of parties and public halves, so that masks of parties with differing views do not cancel."""
    return sha256(context_of(*(f"{name} {public.hex()}" for name, public in sorted(members.items())))).digest()


def pair_mask_seed(private: bytes, public: bytes, context: bytes, one: str, other: str) -> bytes:
    return keys.agreed(private, public, context + context_of("mask", *sorted((one, other))))


def commitment(seed: bytes, context: bytes, name: str) -> bytes:
    return keys.derived(seed, context + context_of("commitment", name))


def own_mask_seed(seed: bytes, context: bytes, name: str) -> bytes:
    return keys.derived(seed, context + context_of("own", name))


@dataclass
class Party:
    """One party's secrets and stage in one sum; each phase happens once, in order.

    A repeated request with unchanged content gets the same answer, as a process may have died with the first one.
    Anything else would be a second vector under one mask, or other shares of one secret, and is refused.

    Attributes:
        name: Name of the client.
        context: Run, round, ask and request, on which all keys depend.
        group: Digest of the members and their public halves, on which masks and sealed shares depend as well.
        stage: Last phase completed: ``keys``, ``shared``, ``ready``, ``sent`` or ``opened``.
        for_shares, for_masks: Private keys.
        seed: Seed of the client's own mask.
        members: Public half of each party that exchanges shares, by name.
        held: Shares that each party made for this one: of its seed, then of its key for masks.
        made: Sealed shares for each party; at the end, the opened share of each owner.
        digest: Digest of the words that were masked; at the end, of the survivors.
    """

    name: str
    context: bytes
    stage: str = "keys"
    for_shares: bytes = field(default_factory=keys.new_key, repr=False)
    for_masks: bytes = field(default_factory=keys.new_key, repr=False)
    seed: bytes = field(default_factory=keys.new_key, repr=False)
    members: dict[str, bytes] = field(default_factory=dict)
    held: dict[str, bytes] = field(default_factory=dict, repr=False)
    made: dict[str, bytes] = field(default_factory=dict)
    digest: str = ""
    group: bytes = b""

    @property
    def public(self) -> bytes:
        promised = commitment(self.seed, self.context, self.name)
        return keys.public_of(self.for_shares) + keys.public_of(self.for_masks) + promised

    def shares(self, members: Mapping[str, bytes], threshold: Callable[[int], int]) -> dict[str, bytes]:
        """Sealed shares of the party's secrets, for each other party.

        Args:
            members: Public half of each party, this one included.
            threshold: Maps a number of parties to t.

        Raises:
            PayloadError: there are too few parties, its own half was changed, or two parties have the same key.
        """
        if self.stage == "shared" and dict(members) == self.members:
            return dict(self.made)
        self._advance("keys", "shared")
        self._require_members(members)
        self.members = dict(sorted(members.items()))  # positions of shares, the same for all
        self.group = group_digest(self.members)
        t, n = threshold(len(members)), len(members)
        pairs = zip(keys.split(self.seed, n, t), keys.split(self.for_masks, n, t), strict=True)
        own = {name: first + second for name, (first, second) in zip(self.members, pairs, strict=True)}
        self.held = {self.name: own.pop(self.name)}
        self.made = {name: keys.sealed(self._key(name, self.name, name), own[name], self.context) for name in own}
        return dict(self.made)

    def receive(self, sealed: Mapping[str, bytes], threshold: Callable[[int], int]) -> None:
        """Take the shares of the parties that made some; the reply is masked against these parties only.

        Raises:
            PayloadError: the shares are too few, were changed, or were made for another round, party or key.
        """
        again = self.stage == "sent"
        if not again:
            self._advance("shared", "ready")
        if strangers := sorted(set(sealed) - set(self.members) | ({self.name} & set(sealed))):
            raise PayloadError(f"shares of {', '.join(strangers)}, with whom no keys were exchanged")
        self._require_many(len(sealed) + 1, threshold)
        shares = {name: self._unsealed(name, text) for name, text in sealed.items()} | {self.name: self.held[self.name]}
        if again and shares != self.held:
            self._advance("shared", "ready")
        self.held = shares

    def _unsealed(self, sender: str, text: bytes) -> bytes:
        try:
            shares = keys.unsealed(self._key(sender, sender, self.name), text, self.context)
        except PayloadError as error:
            raise PayloadError(f"'{sender}': {error}") from error
        if len(shares) != 2 * keys.SHARE_BYTES:
            raise PayloadError(f"'{sender}': {len(shares)} bytes of shares, expected {2 * keys.SHARE_BYTES}")
        return shares

    def masked(self, words: Residues) -> Residues:
        """Masked words to send; other words are masked only once.

        Raises:
            PayloadError: other words were masked before, or the party has no shares yet.
        """
        digest = sha256(words.tobytes()).hexdigest()
        if self.stage != "sent" or digest != self.digest:
            self._advance("ready", "sent")
        self.digest = digest
        result = words.copy()
        keys.add_mask(result, own_mask_seed(self.seed, self.context, self.name))
        for name in self.held.keys() - {self.name}:
            public = self.members[name][_FOR_MASKS]
            seed = pair_mask_seed(self.for_masks, public, self.context + self.group, self.name, name)
            keys.add_mask(result, seed, negative=self.name > name)
        return result

    def opened(self, survivors: Collection[str], threshold: Callable[[int], int]) -> dict[str, bytes]:
        """Share of each party: of its seed if its words arrived, of its key for masks if they did not.

        The party forgets all secrets and must be stored before the answer leaves: an answer for other survivors would
        unmask a party.

        Raises:
            PayloadError: the survivors are too few or not parties of this sum, or this party is not among them.
        """
        asked = sha256(context_of(*sorted(survivors))).hexdigest()
        if self.stage == "opened" and asked == self.digest:
            return dict(self.made)
        self._advance("sent", "opened")
        strangers = sorted(set(survivors) - set(self.held))
        if strangers or self.name not in survivors:
            raise PayloadError(f"shares are asked for {', '.join(strangers) or 'others'} in place of those of this sum")
        self._require_many(len(set(survivors)), threshold)
        cut = keys.SHARE_BYTES
        self.made = {name: own[:cut] if name in survivors else own[cut:] for name, own in self.held.items()}
        self.held, self.members, self.digest = {}, {}, asked
        self.for_shares = self.for_masks = self.seed = b""
        return dict(self.made)

    def _advance(self, stage: str, following: str) -> None:
        if self.stage != stage:
            raise PayloadError(f"masks of this round are at '{self.stage}', this takes '{stage}'; keys are used once")
        self.stage = following

    def _require_members(self, members: Mapping[str, bytes]) -> None:
        if len(members) < FEWEST:
            raise PayloadError(f"a sum of {len(members)} clients reveals single values; {FEWEST} are needed")
        if members.get(self.name) != self.public:
            raise PayloadError("this client's own keys are not among those of its type, or were changed")
        for name, public in members.items():
            if len(public) != PUBLIC_BYTES:
                raise PayloadError(f"keys of '{name}' are {len(public)} bytes, expected {PUBLIC_BYTES}")
        for part in (_FOR_SHARES, _FOR_MASKS, _COMMITMENT):
            if len({public[part] for public in members.values()}) < len(members):
                raise PayloadError("two clients have the same key; each makes its own every round")

    def _require_many(self, number: int, threshold: Callable[[int], int]) -> None:
        needed = max(threshold(len(self.members)), FEWEST)
        if number < needed:
            raise PayloadError(f"{number} of {len(self.members)} clients are left, unmasking takes {needed}")

    def _key(self, peer: str, sender: str, receiver: str) -> bytes:
        context = self.context + self.group + context_of("shares", sender, receiver)
        return keys.agreed(self.for_shares, self.members[peer][_FOR_SHARES], context)

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> Party:
        """The party that ``to_json`` wrote."""
        content: dict[str, Any] = json.loads(text)
        for key in ("context", "for_shares", "for_masks", "seed", "group"):
            content[key] = bytes.fromhex(content[key])
        for key in ("members", "held", "made"):
            content[key] = {name: bytes.fromhex(value) for name, value in content[key].items()}
        return cls(**content)


# ---- signatures of sites


_SCHEME = ECDSA(SHA384())


def _statement(client: str, context: bytes, public: bytes) -> bytes:
    """Text to sign; it begins with a bracket, unlike anything that Flower signs with the same key."""
    return context_of("mask keys", client, public.hex()) + context


@dataclass(frozen=True)
class SiteIdentity:
    """Signing key of a site, and the keys of other sites that it trusts.

    Attributes:
        key: Private key of the site.
        roster: Public key of each client's site; None: unsigned keys of other clients are accepted.
    """

    key: EllipticCurvePrivateKey = field(repr=False)
    roster: Mapping[str, EllipticCurvePublicKey] | None = None

    def signature(self, client: str, context: bytes, public: bytes) -> bytes:
        """The site's signature of a client's public half for one sum.

        Args:
            client: Name of the client.
            context: Run, round, ask and request.
            public: Both keys and the commitment.
        """
        return self.key.sign(_statement(client, context, public), _SCHEME)

    def require_signed(self, members: Mapping[str, bytes], signatures: Mapping[str, bytes], context: bytes) -> None:
        """Check that each client's site has signed its public half for this sum.

        Raises:
            PayloadError: a client's site has not signed or is unknown; the message names the client.
        """
        if self.roster is None:
            return
        for client, public in members.items():
            if client not in self.roster:
                what = f"keys of '{client}', whose site has no key on this site's roster"
                raise PayloadError(f"{what}; if it is of this federation: polyfed deploy trust")
            if client not in signatures:
                raise PayloadError(f"keys of '{client}' are not signed, and this site has a roster")
            try:
                self.roster[client].verify(signatures[client], _statement(client, context, public), _SCHEME)
            except InvalidSignature as error:
                raise PayloadError(
                    f"keys of '{client}' are not signed by its site for this round: they are another's, of another "
                    "round, were changed on the way, or its client was asked something else than this one"
                ) from error


# ---- at the server


@dataclass(frozen=True)
class Unmasking:
    """Removal of the remaining masks of one sum, with shares from the clients that are still there.

    Attributes:
        context: Run, round, ask and request.
        members: Public half of each party that made shares.
        masked: Parties that received each other's shares, and share masks.
        threshold: Number t of shares that restore a secret.
    """

    context: bytes
    members: Mapping[str, bytes]
    masked: Sequence[str]
    threshold: int

    def sum(self, words: Residues, survivors: Sequence[str], shares: Mapping[str, Mapping[str, bytes]]) -> Residues:
        """The sum of the survivors' unmasked words.

        Args:
            words: Sum of the masked words of the survivors.
            survivors: Parties whose words are in the sum.
            shares: Opened shares of each party, by owner.

        Raises:
            PayloadError: shares of a client's secret are too few, or too many are false; the message names it.
        """
        result, pairs = words.copy(), self.context + group_digest(self.members)
        for name in survivors:
            seed = self._secret(name, shares, _COMMITMENT, partial(commitment, context=self.context, name=name))
            keys.add_mask(result, own_mask_seed(seed, self.context, name), negative=True)
        for absent in (name for name in self.masked if name not in survivors):
            private = self._secret(absent, shares, _FOR_MASKS, keys.public_of)
            for name in survivors:
                seed = pair_mask_seed(private, self.members[name][_FOR_MASKS], pairs, absent, name)
                # the survivor added it if its name comes first
                keys.add_mask(result, seed, negative=name < absent)
        return result

    def _secret(
        self, owner: str, shares: Mapping[str, Mapping[str, bytes]], part: slice, public_of: Callable[[bytes], bytes]
    ) -> bytes:
        """The owner's secret whose public counterpart is this part of its public half."""
        positions = {name: position for position, name in enumerate(sorted(self.members), 1)}
        held = {positions[name]: own[owner] for name, own in shares.items() if owner in own}
        try:
            return keys.recovered(held, self.threshold, lambda secret: public_of(secret) == self.members[owner][part])
        except PayloadError as error:
            raise PayloadError(f"the masks of '{owner}': {error}") from error
