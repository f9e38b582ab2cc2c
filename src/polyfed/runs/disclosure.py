"""What clients of a run send, field by field, and what protects each: from the steps that its method declares."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType

from polyfed.algorithms.algorithm import Algorithm
from polyfed.privacy.secure_sum import SecureSum
from polyfed.privacy.settings import PrivacySettings
from polyfed.wire.payload import Scalar, TensorBundle
from polyfed.wire.schema import StepKind, StepSchema, steps_of

Sendable = type[TensorBundle] | type[Scalar]


@dataclass(frozen=True)
class SentField:
    """A field of the replies to a step.

    Attributes:
        step: of the method.
        step_kind: ``query`` for test metrics, ``fresh`` for what untrained clients tell.
        field: its name; empty for numbers whose names are not known beforehand.
        kinds: what it may hold.
        masked: whether the server gets nothing but the sum over clients of a type.
        noisy: whether it has noise, or is made of weights that were trained with noise.
    """

    step: str
    step_kind: StepKind
    field: str
    kinds: tuple[Sendable, ...]
    masked: bool = False
    noisy: bool = False

    @property
    def tensors(self) -> tuple[type[TensorBundle], ...]:
        """The kinds of tensors among ``kinds``."""
        return tuple(kind for kind in self.kinds if issubclass(kind, TensorBundle))


def sent_fields(
    method: Algorithm | type[Algorithm], secure: SecureSum | None = None, privacy: PrivacySettings | None = None
) -> list[SentField]:
    """Every field that clients of a method may send; a class in place of a method says what any settings may send.

    Args:
        method: as it is set, or its class.
        secure: how replies are summed, if they are.
        privacy: their noise, if they have some.
    """
    summed = method.summed if isinstance(method, Algorithm) and secure is not None and secure.masks else {}
    return [
        field
        for step, schema in steps_of(method).items()
        for field in _fields(step, schema, privacy, masked=step in summed)
    ]


def _fields(step: str, schema: StepSchema, privacy: PrivacySettings | None, *, masked: bool) -> Iterator[SentField]:
    for name, declared in schema.returns.items():
        kinds = typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)
        tensors = any(issubclass(kind, TensorBundle) for kind in kinds)
        noisy = tensors and privacy is not None and schema.kind == "step" and _has_noise(privacy, kinds)
        yield SentField(step, schema.kind, name, kinds, masked, noisy)
    if schema.others is not None:
        yield SentField(step, schema.kind, "", (schema.others,))


def _has_noise(privacy: PrivacySettings, kinds: tuple[Sendable, ...]) -> bool:
    return privacy.reply is None or all(kind in privacy.reply.clips for kind in kinds)
