"""The server's side of a masked sum: it takes off what masks are left, by shares of those who are still there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from polyfed.core.errors import PayloadError
from polyfed.privacy.masking import keys, shamir
from polyfed.privacy.masking.fixed_point import Residues
from polyfed.privacy.masking.party import commitment, group_digest, own_mask_seed, pair_mask_seed


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

    def _secret(self, owner: str, shares: Mapping[str, Mapping[str, bytes]], is_right: shamir.SecretCheck) -> bytes:
        places = {name: place for place, name in enumerate(sorted(self.members), 1)}
        held = {places[name]: own[owner] for name, own in shares.items() if owner in own}
        try:
            return shamir.recovered(held, self.threshold, is_right)
        except PayloadError as error:
            raise PayloadError(f"the masks of '{owner}': {error}") from error

    def _is_seed(self, secret: bytes, name: str) -> bool:
        return commitment(secret, self.context, name) == self.members[name][2 * keys.KEY_BYTES :]

    def _is_key(self, secret: bytes, name: str) -> bool:
        return keys.public_of(secret) == self.members[name][keys.KEY_BYTES : 2 * keys.KEY_BYTES]
