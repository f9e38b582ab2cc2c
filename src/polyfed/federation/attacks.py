"""Attacks on simulated federations: false data and falsified updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.attack import Attack
from polyfed.federation.membership import Member
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Payload, TensorBundle, Weights

_VARIANCE = "running_var"  # torch's own name; a negative one would be refused for that alone


class CorruptedUpdate(Attack):
    """Attackers train honestly and corrupt what they send, each by itself."""

    def falsified(self, payload: Payload, sent: Payload, stream: torch.Generator) -> Payload:
        """Corrupted reply, before encoding.

        Of weights the update is corrupted, their difference from those sent under the same name, or from 0; of rows,
        the rows. Whole numbers and scalars stay.
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
        """Corrupted rows [n, d]: the update of a tensor as one row, or representations or logits."""


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

    def require(self, members: Sequence[Member]) -> None:
        """Check that the attackers classify.

        Raises:
            ConfigError: one does not.
        """
        for member in members:
            if not isinstance(member.settings.task, Classification):
                raise ConfigError(
                    f"run.attackers 'label_flip': {member.id} has no classes to flip (its task is "
                    f"'{member.settings.task.component_name()}'); restrict it with run.attackers.groups"
                )

    def poisoned(self, samples: Samples, member: Member) -> Samples:
        """With flipped labels; classes without names count up to the highest label of the client."""
        task = member.settings.task
        assert isinstance(task, Classification)
        labels = samples.targets[task.target]
        known = task.classes or len(samples.classes.get(task.target, ()))
        highest = known - 1 if known else int(labels.max()) if len(labels) else 0
        return replace(samples, targets={**samples.targets, task.target: highest - labels})


class Noise(CorruptedUpdate):
    """Gaussian noise as long as the update (Blanchard et al., NeurIPS 2017, section 6)."""

    short_name: ClassVar[str] = "noise"

    factor: float = Field(default=1.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        noise = torch.randn(rows.shape, generator=stream).to(rows)
        lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        false: Tensor = noise / torch.linalg.vector_norm(noise, dim=1, keepdim=True) * (self.factor * lengths)
        return false


class Scaled(CorruptedUpdate):
    """The update many times as long, so that it replaces the others' (Bagdasaryan et al., AISTATS 2020)."""

    short_name: ClassVar[str] = "scaled"

    factor: float = Field(default=10.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        return self.factor * rows


class SignFlip(CorruptedUpdate):
    """The update with its sign turned (Li et al., RSA, AAAI 2019)."""

    short_name: ClassVar[str] = "sign_flip"

    factor: float = Field(default=1.0, gt=0, description="length, in updates")

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        return -self.factor * rows


class Constant(CorruptedUpdate):
    """The same for everything: each row is the first; an update of weights has one value, as long as it was.

    (Same-value attack of Li et al., RSA, AAAI 2019; of representations, a collapsed encoder.)
    """

    short_name: ClassVar[str] = "constant"

    def false(self, rows: Tensor, stream: torch.Generator) -> Tensor:
        """The first row for all; of one row, its root mean square."""
        if len(rows) > 1:
            return rows[:1].expand_as(rows).clone()
        return torch.full_like(rows, float(rows.double().square().mean().sqrt()))
