"""Targeted pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from pydantic import Field

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.mentions import mentioning
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.attack import Attack
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member


class TargetedPairs(Attack):
    """Attackers pair what shows one thing with texts of another (Carlini and Terzis, ICLR 2022).

    Each sample whose texts have the word ``source`` gets the text of one of the same client whose texts have the word
    ``target``.
    """

    source: str = Field(min_length=1, description="word in the texts of what is to be taken for something else")
    target: str = Field(min_length=1, description="word in the texts that it gets")
    modality: str = Field(default="text", description="that of the texts")

    @property
    def falsifies(self) -> bool:
        return False

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that the attackers have pairs with texts, of one source.

        Raises:
            ConfigError: one has not.
        """
        for member in members:
            if self.modality not in member.model.encoders or len(member.model.encoders) < 2:
                raise ConfigError(
                    f"run.attackers 'targeted_pairs': {member.id} has no pairs with '{self.modality}' (it encodes "
                    f"{list(member.model.encoders)}); restrict it with run.attackers.groups"
                )
            if member.also is not None or member.settings.items == "public":
                raise ConfigError(
                    f"run.attackers 'targeted_pairs': {member.id} holds items of the public set or a second source; "
                    "restrict it with run.attackers.groups"
                )

    def poisoned(self, samples: Samples, member: Member, split: Split, seed: int) -> Samples:
        """With other texts.

        Raises:
            ConfigError: the client has no sample with one of the words.
        """
        column = split.modality(self.modality)
        places = {}
        for key, word in (("source", self.source), ("target", self.target)):
            places[key] = mentioning(column, [word])[samples.items].nonzero().flatten()
            if not len(places[key]):
                raise ConfigError(f"run.attackers.{key}: no text of {member.id} has the word '{word}'; choose another")
        stream = generator(seed, "targeted-pairs", member.id)
        drawn = torch.randint(len(places["target"]), (len(places["source"]),), generator=stream)
        rows = samples.rows[self.modality].clone()
        rows[places["source"]] = samples.rows[self.modality][places["target"][drawn]]
        return replace(samples, rows={**samples.rows, self.modality: rows})
