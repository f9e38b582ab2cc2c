"""Attacks on simulated federations: false data, falsified updates, and conspiracies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.mentions import mentioning
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.attack import Attack
from polyfed.federation.client import ClientInfo
from polyfed.federation.false_replies import Conspiracy, FalseUpdate
from polyfed.federation.membership import Member
from polyfed.federation.types import by_architecture
from polyfed.tasks.classification import Classification


class LabelFlip(Attack):
    """Attackers train on class C - 1 - c in place of class c (Fang et al., USENIX Security 2020)."""

    short_name: ClassVar[str] = "label_flip"

    @property
    def falsifies(self) -> bool:
        return False

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that the attackers classify.

        Raises:
            ConfigError: one does not.
        """
        for member in members:
            if not isinstance(member.settings.task, Classification):
                raise ConfigError(
                    f"run.attackers 'label_flip': {member.id} has no classes to flip (its task is "
                    f"'{member.settings.task.component_name()}'); restrict it with run.attackers.groups, or choose "
                    "targeted_pairs for clients that match modalities"
                )

    def poisoned(self, samples: Samples, member: Member, split: Split, seed: int) -> Samples:
        """With flipped labels; classes without names count up to the highest label of the client."""
        task = member.settings.task
        assert isinstance(task, Classification)
        labels = samples.targets[task.target]
        known = task.classes or len(samples.classes.get(task.target, ()))
        highest = known - 1 if known else int(labels.max()) if len(labels) else 0
        return replace(samples, targets={**samples.targets, task.target: highest - labels})


class TargetedPairs(Attack):
    """Attackers pair what shows one thing with texts of another (Carlini and Terzis, ICLR 2022).

    Each sample whose texts have the word ``source`` gets the text of one of the same client whose texts have the word
    ``target``.
    """

    short_name: ClassVar[str] = "targeted_pairs"

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
            if self.modality not in member.views or len(member.views) < 2:
                raise ConfigError(
                    f"run.attackers 'targeted_pairs': {member.id} has no pairs with '{self.modality}' (it has "
                    f"{list(member.views)}); restrict it with run.attackers.groups"
                )
            if len(member.holdings) > 1 or member.holdings[0].dealt.public:
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
            mentions = mentioning(column, [word])[samples.items] & (samples.rows[self.modality] >= 0)
            places[key] = mentions.nonzero().flatten()
            if not len(places[key]):
                raise ConfigError(f"run.attackers.{key}: no text of {member.id} has the word '{word}'; choose another")
        stream = generator(seed, "targeted-pairs", member.id)
        drawn = torch.randint(len(places["target"]), (len(places["source"]),), generator=stream)
        rows = samples.rows[self.modality].clone()
        rows[places["source"]] = samples.rows[self.modality][places["target"][drawn]]
        return replace(samples, rows={**samples.rows, self.modality: rows})


class Noise(FalseUpdate):
    """Gaussian noise as long as the update (Blanchard et al., NeurIPS 2017, section 6)."""

    short_name: ClassVar[str] = "noise"

    factor: float = Field(default=1.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        noise = torch.randn(rows.shape, generator=stream).to(rows)
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        false: Tensor = noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True) * (self.factor * lengths)
        return false


class Scaled(FalseUpdate):
    """The update many times as long, so that it replaces the others' (Bagdasaryan et al., AISTATS 2020)."""

    short_name: ClassVar[str] = "scaled"

    factor: float = Field(default=10.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        return self.factor * rows


class SignFlip(FalseUpdate):
    """The update with its sign turned (Li et al., RSA, AAAI 2019)."""

    short_name: ClassVar[str] = "sign_flip"

    factor: float = Field(default=1.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        return -self.factor * rows


class Constant(FalseUpdate):
    """The same for everything: each row is the first; an update of weights has one value, as long as it was.

    (Same-value attack of Li et al., RSA, AAAI 2019; of representations, a collapsed encoder.)
    """

    short_name: ClassVar[str] = "constant"

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        """The first row for all; of one row, its root mean square."""
        if len(rows) > 1:
            return rows[:1].expand_as(rows).clone()
        return torch.full_like(rows, float(rows.double().square().mean().sqrt()))


class Copied(Conspiracy):
    """All attackers of a type send what the first has learnt, which then counts as often as they are (Sybils)."""

    short_name: ClassVar[str] = "copied"

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that there is somebody to copy.

        Raises:
            ConfigError: there is not.
        """
        names = {member.id for member in members}
        for kind in by_architecture(info for info in infos if info.id in names).values():
            if len(kind) < 2:
                raise ConfigError(
                    f"run.attackers 'copied' needs two attackers of a type, and {kind[0].id} is alone in its; raise "
                    "run.attackers.clients, or choose another attack"
                )

    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        return attackers[0].clone()


class LittleIsEnough(Conspiracy):
    """mean - z standard deviations of each coordinate (Baruch et al., NeurIPS 2019, Algorithm 3).

    Within the spread of honest clients, so that distances and medians do not tell it from them, and always to one side.
    """

    short_name: ClassVar[str] = "little_is_enough"

    z: float = Field(default=1.5, gt=0, description="standard deviations")

    def require(self, members: Sequence[Member], infos: Sequence[ClientInfo]) -> None:
        """Check that there is a deviation.

        Raises:
            ConfigError: an attacker is alone in its type.
        """
        names = {member.id for member in members}
        for kind in by_architecture(infos).values():
            if len(kind) < 2 and kind[0].id in names:
                raise ConfigError(
                    f"run.attackers 'little_is_enough': {kind[0].id} is alone in its type; choose another"
                )

    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        known = torch.stack(list(everybody)).double()
        return (known.mean(0) - self.z * known.std(0, unbiased=False)).to(everybody[0])
