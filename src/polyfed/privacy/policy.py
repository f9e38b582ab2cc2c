"""Protection of a run's replies: for each field its protection and its cost."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import UnionType
from typing import Any

from polyfed.privacy.accounting import Neighbours, PrivacyCost, epsilon_of
from polyfed.privacy.private_training import training_cost
from polyfed.privacy.rules import Clipping, RobustRule
from polyfed.privacy.secure_sum import SecureSum
from polyfed.privacy.settings import PrivacySettings, protected_steps
from polyfed.wire.payload import Scalar, TensorBundle
from polyfed.wire.schema import StepKind, StepSchema, steps_of

Sendable = type[TensorBundle] | type[Scalar]


@dataclass(frozen=True)
class SentField:
    """A field of the replies to a step.

    Attributes:
        step: Step of the method.
        step_kind: ``query`` for test metrics, ``fresh`` for steps of untrained clients.
        field: Name of the field; empty for numbers whose names are not known beforehand.
        kinds: Types of its content.
        masked: True if the server gets only the sum over clients of a type.
        noisy: True if it has noise, or is made of weights that were trained with noise.
    """

    step: str
    step_kind: StepKind
    field: str
    kinds: tuple[Sendable, ...]
    masked: bool = False
    noisy: bool = False

    @property
    def tensors(self) -> tuple[type[TensorBundle], ...]:
        """The types of tensors among ``kinds``."""
        return tuple(bundle for bundle in self.kinds if issubclass(bundle, TensorBundle))


@dataclass(frozen=True)
class Policy:
    """Protection of a run's replies, from the steps that its method declares.

    Attributes:
        method: Method with its settings, or its class, which declares the fields of all settings.
        rounds: Number of rounds of the run.
        privacy: Settings of the noise, resolved.
        secure: Settings of the secure sum.
        clip: Bound on one client's update; like ``robust``, known to the server only.
        robust: Robust rule against a minority.
    """

    method: Any
    rounds: int = 1
    privacy: PrivacySettings | None = None
    secure: SecureSum | None = None
    clip: Clipping | None = None
    robust: RobustRule | None = None

    # ---- what is protected

    @cached_property
    def steps(self) -> Mapping[str, StepSchema]:
        return steps_of(self.method)

    @cached_property
    def charged(self) -> Mapping[str, StepSchema]:
        """Steps whose replies have noise, and cost budget."""
        return {} if self.privacy is None else protected_steps(self.privacy, self.steps)

    @cached_property
    def fields(self) -> list[SentField]:
        """Every field that clients may send."""
        is_summed = self.secure is not None and self.secure.masks and not isinstance(self.method, type)
        return [
            field
            for step, schema in self.steps.items()
            for field in _fields(step, schema, self.privacy, masked=is_summed and schema.mean_by is not None)
        ]

    # ---- how

    def how(self, sent: SentField) -> str:
        """Description of a field's protection."""
        if sent.step_kind == "fresh":
            return "in the clear, before any training"
        words = ["masked: the server gets the sum"] if sent.masked else []
        if sent.noisy and self.privacy is not None:
            words.append(_noise_on(sent, self.privacy))
        return ", ".join(words) or "in the clear"

    def words(self, delta: float | None = None) -> str:
        """Description of the replies' protection, and their planned cost at ``delta``, or that of the budget."""
        method = self.method.component_name()
        return "; ".join(self._parts(method, delta)) or f"none: replies of '{method}' leave as they are"

    def _parts(self, method: str, delta: float | None) -> Iterator[str]:
        if self.secure is not None:
            masked = "masked sums" if self.secure.masks else "sums in the clear: the server sees each reply"
            summed = ", ".join(step for step, schema in self.steps.items() if schema.mean_by)
            yield f"{summed} of '{method}' in {masked}"
        if self.privacy is None:
            return
        cost = ""
        if self.privacy.reply is not None:
            number, delta = self.privacy.planned_releases(self.rounds), delta or self.privacy.budget.delta
            cost = f"; planned epsilon {self.planned(delta):.3g} at delta {delta:g} in {number} replies"
        yield f"{', '.join(self.charged)} of '{method}': {_noise(self.privacy)}{cost}"

    def against_false(self) -> str:
        """Description of the limits on false clients."""
        clip = "" if self.clip is None else f"updates clipped to {self.clip.times:g} medians"
        rule = "" if self.robust is None else f"{self.robust.component_name()} of each type"
        return ", ".join(filter(None, (clip, rule))) or "nothing: each counts as it is"

    # ---- at what cost

    def cost(self, schema: StepSchema, samples: int, batch: int) -> PrivacyCost | None:
        """Privacy cost of a client's reply to a step, if it has any.

        Args:
            schema: Schema of the step.
            samples: Number of the client's training samples.
            batch: Samples per batch.
        """
        if self.privacy is None or schema.kind != "step":
            return None
        if self.privacy.samples is None:
            return self.privacy.cost(schema)
        local = self.method.local_training
        epochs, steps = (1, None) if local is None else (local.epochs, local.steps)
        return training_cost(self.privacy.samples, samples, batch, epochs, steps)

    def planned(self, delta: float) -> float:
        """Epsilon of noise on all planned replies, for the method's cheapest step; 0 without such noise."""
        if self.privacy is None:
            return 0.0
        costs = [self.privacy.cost(schema) for schema in self.charged.values()]
        cheapest = max((cost for cost in costs if cost), key=lambda cost: cost.noise, default=None)
        return 0.0 if cheapest is None else epsilon_of([cheapest] * self.privacy.planned_releases(self.rounds), delta)

    def planned_training(self, samples: int, batch: int, delta: float, neighbours: Neighbours) -> Mapping[str, float]:
        """Epsilon of all planned replies of each step, where training has noise; it depends on the samples."""
        if self.privacy is None or self.privacy.samples is None:
            return {}
        number = self.privacy.planned_releases(self.rounds)
        costs = {step: self.cost(schema, samples, batch) for step, schema in self.charged.items()}
        return {step: epsilon_of([cost] * number, delta, neighbours) for step, cost in costs.items() if cost}


def _noise_on(sent: SentField, privacy: PrivacySettings) -> str:
    if privacy.samples is not None:
        return "trained with noise (DP-SGD)"
    assert privacy.reply is not None
    norms = " or ".join(f"{clip:g}" for clip in sorted({privacy.reply.clips[bundle] for bundle in sent.tensors}))
    return f"with noise: clipped to norm {norms}, noise multiplier {privacy.reply.noise_multiplier:.3g}"


def _noise(privacy: PrivacySettings) -> str:
    if privacy.samples is not None:
        multiplier = privacy.samples.noise_multiplier
        return f"DP-SGD, gradients clipped to norm {privacy.samples.clip:g}, noise multiplier {multiplier:g}"
    assert privacy.reply is not None
    clips = ", ".join(f"{bundle.label} clipped to norm {clip:g}" for bundle, clip in privacy.reply.clips.items())
    return f"{clips}; noise multiplier {privacy.reply.noise_multiplier:.3g}"


def _fields(step: str, schema: StepSchema, privacy: PrivacySettings | None, *, masked: bool) -> Iterator[SentField]:
    for name, declared in schema.returns.items():
        options = typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)
        sent = SentField(step, schema.kind, name, options, masked)
        if privacy is not None and schema.kind == "step" and sent.tensors:
            sent = replace(sent, noisy=privacy.reply is None or privacy.reply.clips.keys() >= set(options))
        yield sent
    if schema.others is not None:
        yield SentField(step, schema.kind, "", (schema.others,))
