"""What does not go together in an experiment: pairs of features, each with its reason."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType

from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.federation.attack import Attack
from polyfed.federation.attacks import Conspiracy
from polyfed.federation.paces import LatePace, Pace
from polyfed.privacy.settings import AggregationSettings
from polyfed.wire.payload import Prototypes, TensorBundle
from polyfed.wire.schema import Declared, steps_of


@dataclass(frozen=True)
class Choice:
    """What an experiment has chosen."""

    method: Algorithm
    aggregation: AggregationSettings
    pace: Pace | None = None
    attackers: Sequence[Attack] = ()

    @property
    def name(self) -> str:
        return f"algorithm '{self.method.component_name()}'"


Feature = Callable[[Choice], str]
"""What a choice has of a feature, in the words of its settings; empty: nothing."""


def late_replies(choice: Choice) -> str:
    return f"run.pace '{choice.pace.component_name()}'" if isinstance(choice.pace, LatePace) else ""


def masked_sums(choice: Choice) -> str:
    rule = choice.aggregation.secure
    return "" if rule is None else f"aggregation.secure '{rule.component_name()}'"


def robust_rule(choice: Choice) -> str:
    rule = choice.aggregation.robust
    return "" if rule is None else f"aggregation.robust '{rule.component_name()}'"


def clipping(choice: Choice) -> str:
    return "" if choice.aggregation.clip is None else "aggregation.clip"


def conspiracy(choice: Choice) -> str:
    names = [attack.component_name() for attack in choice.attackers if isinstance(attack, Conspiracy)]
    return f"run.attackers '{names[0]}'" if names else ""


def falsified_replies(choice: Choice) -> str:
    names = [attack.component_name() for attack in choice.attackers if attack.falsifies]
    return f"run.attackers '{names[0]}'" if names else ""


def public_samples(choice: Choice) -> str:
    public = getattr(choice.method, "public", None)
    return "" if getattr(public, "samples", None) is None else "algorithm.public.samples"


def sequential_mean(choice: Choice) -> str:
    mean = getattr(getattr(choice.method, "averaging", None), "mean", "exact")
    return "" if mean == "exact" else f"algorithm.averaging.mean '{mean}'"


def teacher_of(choice: Choice) -> Teacher | None:
    teacher = getattr(choice.method, "teacher", None)
    return teacher if isinstance(teacher, Teacher) else None


def weighed_by_content(choice: Choice) -> str:
    name = teacher.weights.component_name() if (teacher := teacher_of(choice)) else "count"
    return "" if name == "count" else f"algorithm.teacher.weights '{name}'"


def alignment(choice: Choice) -> str:
    return "algorithm.teacher.alignment" if (teacher := teacher_of(choice)) and teacher.alignment else ""


def unasked_clients(choice: Choice) -> str:
    return "" if choice.method.asks_clients else choice.name


def one_model_a_round(choice: Choice) -> str:
    return choice.name if choice.method.asks_clients and not choice.method.takes_late_replies else ""


def averaged_changes(choice: Choice) -> str:
    rule = getattr(choice.method, "averaging", None)
    return f"algorithm.averaging '{rule.component_name()}'" if rule is not None and rule.is_of_changes else ""


def nothing_combined(choice: Choice) -> str:
    return "" if returned_bundles(choice.method) else choice.name


def unsummed_method(choice: Choice) -> str:
    return "" if choice.method.summed else f"{choice.name}, as it is set"


def single_values(choice: Choice) -> str:
    """Steps whose replies have more than their sum tells."""
    for step, schema in steps_of(choice.method).items():
        weight = choice.method.summed.get(step)
        own = [
            field
            for field, declared in schema.returns.items()
            if step not in choice.method.summed or (field != weight and not _is_summed(declared))
        ]
        if schema.kind == "step" and (own or schema.others is not None):
            return f"{choice.name}, which needs {', '.join(own) or 'scalars'} of each client in its step '{step}'"
    return ""


CONFLICTS: tuple[tuple[Feature, Feature, str], ...] = (
    (late_replies, unasked_clients, "it asks nobody; set run.pace to sync"),
    (
        late_replies,
        one_model_a_round,
        "its rounds need all replies, to what was asked now; set run.pace to sync, or choose fedavg or creamfl",
    ),
    (
        late_replies,
        averaged_changes,
        "it averages changes B A of factors of one model; set run.pace to sync, or choose fedit",
    ),
    (late_replies, public_samples, "each round has other public samples; leave that out"),
    (late_replies, sequential_mean, "it needs to know who replies; set it to exact"),
    (late_replies, masked_sums, "masks cancel among clients that are asked at once; set run.pace to sync"),
    (late_replies, robust_rule, "a rule bears a minority of all replies, not of the first; set run.pace to sync"),
    (robust_rule, nothing_combined, "its clients send nothing that is combined; leave the rule out"),
    (robust_rule, alignment, "each client sends in a space of its own; set that to null"),
    (falsified_replies, nothing_combined, "its clients send nothing to falsify; choose label_flip"),
    (masked_sums, weighed_by_content, "it weighs clients by what each sends; choose count"),
    (masked_sums, alignment, "it maps the representations of each client; set it to null"),
    (masked_sums, sequential_mean, "it takes replies one after the other; set it to exact"),
    (masked_sums, unsummed_method, "it needs each client's reply; choose a method that averages"),
    (masked_sums, single_values, "only sums are seen; choose a method that only averages"),
    (masked_sums, robust_rule, "a rule compares single replies; choose one of the two"),
    (masked_sums, clipping, "it looks at each reply; set it to null"),
    (masked_sums, conspiracy, "it changes what was sent; choose an attack of single clients"),
)
"""In the order in which they are told: what settings change comes before what another method takes."""


def conflicts(choice: Choice) -> Iterator[str]:
    """What of a choice does not go together, a line each."""
    for one, other, reason in CONFLICTS:
        if (first := one(choice)) and (second := other(choice)):
            yield f"{first} does not go with {second}: {reason}"


def require_together(choice: Choice) -> None:
    """Check that all that is chosen goes together.

    Raises:
        ConfigError: something does not.
    """
    for conflict in conflicts(choice):
        raise ConfigError(conflict)


def returned_bundles(method: Algorithm) -> set[type[TensorBundle]]:
    """Kinds of tensors that a method's clients send in its rounds."""
    kinds: set[type[TensorBundle]] = set()
    for schema in steps_of(method).values():
        for declared in schema.returns.values() if schema.kind != "fresh" else ():
            kinds |= {kind for kind in _kinds(declared) if isinstance(kind, type) and issubclass(kind, TensorBundle)}
    return kinds


def _is_summed(declared: Declared) -> bool:
    kinds = _kinds(declared)  # prototypes count by class
    return all(isinstance(kind, type) and issubclass(kind, TensorBundle) and kind is not Prototypes for kind in kinds)


def _kinds(declared: Declared) -> tuple[object, ...]:
    return typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)
