"""Attacks on simulated federations: false data, falsified updates, and conspiracies."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.item_classes import mentioning
from polyfed.data.samples import Samples
from polyfed.data.source import Split
from polyfed.federation.attack import Attack
from polyfed.federation.client import ClientInfo
from polyfed.federation.membership import Member
from polyfed.federation.types import by_architecture
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Payload, TensorBundle, Weights

_VARIANCE = "running_var"  # torch's own name; a negative one would be refused for that alone


class FalseUpdate(Attack):
    """Each attacker trains as it should, and falsifies what it sends, alone."""

    def falsified(self, payload: Payload, sent: Payload, stream: torch.Generator) -> Payload:
        """A reply as it leaves, before it is encoded.

        Of weights the update is falsified, which is what they changed from those sent under the same name, or from 0;
        of rows, the rows. Whole numbers and scalars stay.
        """
        fields = dict(payload.fields)
        for name, bundle in payload.bundles.items():
            start, tensors = sent.bundles.get(name), dict(bundle)
            is_weights = isinstance(bundle, Weights)
            known = start if is_weights and isinstance(start, Weights) else {}
            for key, value in bundle.items():
                if value.is_floating_point() and value.numel():
                    centre = known[key].to(value) if key in known else torch.zeros_like(value)
                    # weights are one vector each, rows one a sample
                    rows = (value - centre).reshape(1 if is_weights else -1, -1 if is_weights else value.shape[-1])
                    tensors[key] = centre + self.false(rows, stream).reshape(value.shape)
            fields[name] = remade(bundle, tensors)
        return Payload(fields)

    @abstractmethod
    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        """What stands for rows [n, d]: a tensor's update as one row, or representations or logits."""


class Conspiracy(Attack):
    """Attackers of a type agree on what they send, knowing what each has learnt, or what all clients send."""

    def agreed(self, honest: Mapping[str, Payload], attackers: Sequence[str]) -> dict[str, Payload]:
        """What the attackers of one type send in a round.

        Args:
            honest: client -> what training made of it, of all clients of the type that replied, in client order.
            attackers: those of them who attack, at least one.
        """
        replies: dict[str, Payload] = {}
        for name in attackers:
            fields = dict(honest[name].fields)
            for field, bundle in honest[name].bundles.items():
                everybody = [payload.bundles[field] for payload in honest.values()]
                fellows = [honest[fellow].bundles[field] for fellow in attackers]
                false = {
                    key: self.common(_like(value, key, everybody), _like(value, key, fellows))
                    for key, value in bundle.items()
                    if value.is_floating_point() and value.numel()
                }
                fields[field] = remade(bundle, {**bundle, **false})
            replies[name] = Payload(fields)
        return replies

    @abstractmethod
    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        """What attackers send in place of a tensor that all clients of the type have, and the attackers among them."""


def _like(value: Tensor, key: str, bundles: Sequence[TensorBundle]) -> list[Tensor]:
    """The tensors of that name and shape."""
    return [bundle[key] for bundle in bundles if key in bundle and bundle[key].shape == value.shape]


def remade(bundle: TensorBundle, tensors: Mapping[str, Tensor]) -> TensorBundle:
    """The bundle with other tensors; variances stay positive, as a negative one would be refused for that alone."""
    sound = {name: value.abs() if name.endswith(_VARIANCE) else value for name, value in tensors.items()}
    return type(bundle)(tensors=sound, **bundle.attributes())


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
            if len(member.holdings) > 1 or member.holdings[0].assignment.public:
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
        positions = {}
        for key, word in (("source", self.source), ("target", self.target)):
            mentions = mentioning(column, [word])[samples.items] & (samples.rows[self.modality] >= 0)
            positions[key] = mentions.nonzero().flatten()
            if not len(positions[key]):
                raise ConfigError(f"run.attackers.{key}: no text of {member.id} has the word '{word}'; choose another")
        stream = generator(seed, "targeted-pairs", member.id)
        drawn = torch.randint(len(positions["target"]), (len(positions["source"]),), generator=stream)
        rows = samples.rows[self.modality].clone()
        rows[positions["source"]] = samples.rows[self.modality][positions["target"][drawn]]
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
        for group in by_architecture(info for info in infos if info.id in names).values():
            if len(group) < 2:
                raise ConfigError(
                    f"run.attackers 'copied' needs two attackers of a type, and {group[0].id} is alone in its; raise "
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
        for group in by_architecture(infos).values():
            if len(group) < 2 and group[0].id in names:
                raise ConfigError(
                    f"run.attackers 'little_is_enough': {group[0].id} is alone in its type; choose another"
                )

    def common(self, everybody: Sequence[Tensor], attackers: Sequence[Tensor]) -> Tensor:
        known = torch.stack(list(everybody)).double()
        return (known.mean(0) - self.z * known.std(0, unbiased=False)).to(everybody[0])
