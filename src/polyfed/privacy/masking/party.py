"""One party to a masked sum: what it tells, what it believes, and what it refuses (Bonawitz et al., CCS 2017)."""

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
"""A party's public half: key for shares, key for masks, commitment to its own mask's seed."""


def context_of(*parts: str | int) -> bytes:
    return json.dumps(parts).encode()


def group_digest(members: Mapping[str, bytes]) -> bytes:
    """What differs for other parties, or other public halves: who was told of others holds masks that do not cancel."""
    return sha256(context_of(*(f"{name} {public.hex()}" for name, public in sorted(members.items())))).digest()


def pair_mask_seed(private: bytes, public: bytes, context: bytes, one: str, other: str) -> bytes:
    return keys.agreed(private, public, context + context_of("mask", *sorted((one, other))))


def commitment(seed: bytes, context: bytes, name: str) -> bytes:
    return keys.derived(seed, context + context_of("commitment", name))


def own_mask_seed(seed: bytes, context: bytes, name: str) -> bytes:
    return keys.derived(seed, context + context_of("own", name))


@dataclass
class Party:
    """What a party knows in one sum; it is used once, phase by phase, and refuses any other order.

    Who asks again, with all as it was, gets the same answer: a process may have died with the first.
    Anything else would be a second vector under one mask, or other shares of one secret.

    Attributes:
        name: its own.
        context: run, round, ask and request, which all keys depend on.
        group: digest of the members and their public halves, which masks and sealed shares depend on as well.
        stage: ``keys``, ``shared``, ``ready``, ``sent``, ``opened``: what it has done.
        for_shares, for_masks: private keys.
        seed: of its own mask.
        members: party -> public half, of those who exchange shares, by name.
        held: party -> its shares as they were made for this one: of its seed, then of its key for masks.
        made: party -> the sealed shares that it was given; at the end, owner -> the share that was told.
        digest: of the words that were masked; at the end, of the survivors.
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
        """Sealed shares of its secrets, for each other party.

        Args:
            members: party -> public half, itself among them.
            threshold: t, of so many parties.

        Raises:
            PayloadError: too few parties, its own half changed, or two parties have one key.
        """
        if self.stage == "shared" and dict(members) == self.members:
            return dict(self.made)
        self._at("keys", "shared")
        self._require_members(members)
        self.members = dict(sorted(members.items()))  # places of shares, the same for all, whatever a wire does
        self.group = group_digest(self.members)
        t, n = threshold(len(members)), len(members)
        pairs = zip(keys.split(self.seed, n, t), keys.split(self.for_masks, n, t), strict=True)
        own = {name: first + second for name, (first, second) in zip(self.members, pairs, strict=True)}
        self.held = {self.name: own.pop(self.name)}
        self.made = {name: keys.sealed(self._key(name, self.name, name), own[name], self.context) for name in own}
        return dict(self.made)

    def receive(self, sealed: Mapping[str, bytes], threshold: Callable[[int], int]) -> None:
        """Take up the shares of those who made some; what it sends is masked against these, and no others.

        Raises:
            PayloadError: they are too few, were changed, or were made for another round, party or key.
        """
        again = self.stage == "sent"
        if not again:
            self._at("shared", "ready")
        strangers = sorted(set(sealed) - set(self.members) | ({self.name} & set(sealed)))
        if strangers:
            raise PayloadError(f"shares of {', '.join(strangers)}, with whom no keys were exchanged")
        self._require_many(len(sealed) + 1, threshold)
        shares = {name: self._opened(name, text) for name, text in sealed.items()} | {self.name: self.held[self.name]}
        if again and shares != self.held:
            self._at("shared", "ready")
        self.held = shares

    def _opened(self, sender: str, text: bytes) -> bytes:
        try:
            shares = keys.unsealed(self._key(sender, sender, self.name), text, self.context)
        except PayloadError as error:
            raise PayloadError(f"'{sender}': {error}") from error
        if len(shares) != 2 * keys.SHARE_BYTES:
            raise PayloadError(f"'{sender}': {len(shares)} bytes of shares, expected {2 * keys.SHARE_BYTES}")
        return shares

    def masked(self, words: Residues) -> Residues:
        """What it sends in place of its words; of other words, once.

        Raises:
            PayloadError: other words were masked before, or it has no shares yet.
        """
        digest = sha256(words.tobytes()).hexdigest()
        if self.stage != "sent" or digest != self.digest:
            self._at("ready", "sent")
        self.digest = digest
        result = words.copy()
        keys.add_mask(result, own_mask_seed(self.seed, self.context, self.name))
        for name in self.held:
            if name == self.name:
                continue
            public = self.members[name][keys.KEY_BYTES : 2 * keys.KEY_BYTES]
            seed = pair_mask_seed(self.for_masks, public, self.context + self.group, self.name, name)
            keys.add_mask(result, seed, negative=self.name > name)
        return result

    def opened(self, survivors: Collection[str], threshold: Callable[[int], int]) -> dict[str, bytes]:
        """Party -> share: of the seed of those whose words arrived, of the key of those whose words did not.

        All secrets are forgotten by it, and it must be stored before the answer leaves: a second one, for other
        survivors, would unmask a party.

        Raises:
            PayloadError: the survivors are too few, or no parties of this sum, or it is not among them.
        """
        asked = sha256(context_of(*sorted(survivors))).hexdigest()
        if self.stage == "opened" and asked == self.digest:
            return dict(self.made)
        self._at("sent", "opened")
        strangers = sorted(set(survivors) - set(self.held))
        if strangers or self.name not in survivors:
            raise PayloadError(f"shares are asked for {', '.join(strangers) or 'others'} in place of those of this sum")
        self._require_many(len(set(survivors)), threshold)
        cut = keys.SHARE_BYTES
        self.made = {name: own[:cut] if name in survivors else own[cut:] for name, own in self.held.items()}
        self.held, self.members, self.digest = {}, {}, asked
        self.for_shares = self.for_masks = self.seed = b""
        return dict(self.made)

    def _at(self, stage: str, following: str) -> None:
        if self.stage != stage:
            raise PayloadError(f"masks of this round are at '{self.stage}', this takes '{stage}'; keys are used once")
        self.stage = following

    def _require_members(self, members: Mapping[str, bytes]) -> None:
        if len(members) < FEWEST:
            raise PayloadError(f"a sum of {len(members)} clients tells one the value of another; {FEWEST} are needed")
        if members.get(self.name) != self.public:
            raise PayloadError("this client's own keys are not among those of its type, or were changed")
        for name, public in members.items():
            if len(public) != PUBLIC_BYTES:
                raise PayloadError(f"keys of '{name}' are {len(public)} bytes, expected {PUBLIC_BYTES}")
        for part in range(3):
            own = [public[part * keys.KEY_BYTES : (part + 1) * keys.KEY_BYTES] for public in members.values()]
            if len(set(own)) < len(own):
                raise PayloadError("two clients have the same key; each makes its own every round")

    def _require_many(self, number: int, threshold: Callable[[int], int]) -> None:
        needed = max(threshold(len(self.members)), FEWEST)
        if number < needed:
            raise PayloadError(f"{number} of {len(self.members)} clients are left, unmasking takes {needed}")

    def _key(self, peer: str, sender: str, receiver: str) -> bytes:
        public = self.members[peer][: keys.KEY_BYTES]
        return keys.agreed(self.for_shares, public, self.context + self.group + context_of("shares", sender, receiver))

    # ---- between phases

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=bytes.hex)

    @classmethod
    def from_json(cls, text: str) -> Party:
        """What ``to_json`` made."""
        content: dict[str, Any] = json.loads(text)
        for key in ("context", "for_shares", "for_masks", "seed", "group"):
            content[key] = bytes.fromhex(content[key])
        for key in ("members", "held", "made"):
            content[key] = {name: bytes.fromhex(value) for name, value in content[key].items()}
        return cls(**content)


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


@dataclass(frozen=True)
class Unmasking:
    """One sum.

    Attributes:
        context: run, round, ask and request.
        members: party -> public half, of those among whom shares were dealt out.
        masked: those who received each other's shares; masks run between them.
        threshold: t.
    """

    context: bytes
    members: Mapping[str, bytes]
    masked: Sequence[str]
    threshold: int

    def sum(self, words: Residues, survivors: Sequence[str], shares: Mapping[str, Mapping[str, bytes]]) -> Residues:
        """The sum of the survivors' words, of the sum of what they sent.

        Args:
            words: sum of what survivors sent.
            survivors: whose words are in it.
            shares: party -> what it gave, by owner.

        Raises:
            PayloadError: shares of somebody's secret are too few, or too many are false; it says whose.
        """
        result = words.copy()
        for name in survivors:
            seed = self._secret(name, shares, partial(self._is_seed, name=name))
            keys.add_mask(result, own_mask_seed(seed, self.context, name), negative=True)
        for name in self.masked:
            if name not in survivors:
                private = self._secret(name, shares, partial(self._is_key, name=name))
                self._remove(result, name, private, survivors)
        return result

    def _remove(self, words: Residues, absent: str, private: bytes, survivors: Sequence[str]) -> None:
        context = self.context + group_digest(self.members)
        for name in survivors:
            public = self.members[name][keys.KEY_BYTES : 2 * keys.KEY_BYTES]
            seed = pair_mask_seed(private, public, context, absent, name)
            # the survivor added it if its name comes first
            keys.add_mask(words, seed, negative=name < absent)

    def _secret(self, owner: str, shares: Mapping[str, Mapping[str, bytes]], is_right: keys.SecretCheck) -> bytes:
        places = {name: place for place, name in enumerate(sorted(self.members), 1)}
        held = {places[name]: own[owner] for name, own in shares.items() if owner in own}
        try:
            return keys.recovered(held, self.threshold, is_right)
        except PayloadError as error:
            raise PayloadError(f"the masks of '{owner}': {error}") from error

    def _is_seed(self, secret: bytes, name: str) -> bool:
        return commitment(secret, self.context, name) == self.members[name][2 * keys.KEY_BYTES :]

    def _is_key(self, secret: bytes, name: str) -> bool:
        return keys.public_of(secret) == self.members[name][keys.KEY_BYTES : 2 * keys.KEY_BYTES]
