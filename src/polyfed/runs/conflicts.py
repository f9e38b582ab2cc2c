"""Conflicts of an experiment: pairs of features, each with its reason."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

from polyfed.algorithms.algorithm import Algorithm
from polyfed.federation.attack import Attack
from polyfed.federation.paces import Buffered
from polyfed.privacy.settings import AggregationSettings, PrivacySettings
from polyfed.runs.settings import InitialModels, RunSettings
from polyfed.wire.payload import TensorBundle
from polyfed.wire.schema import Declared, steps_of


@dataclass(frozen=True)
class Choice:
    """The sections of an experiment that conflicts are about."""

    algorithm: Algorithm
    aggregation: AggregationSettings = field(default_factory=AggregationSettings)
    run: RunSettings = field(default_factory=RunSettings)
    privacy: PrivacySettings | None = None
    initial: InitialModels | None = None


Feature = Callable[[Choice], str]
"""A feature of a choice, in the words of its settings; empty: absent."""


def chosen(path: str, unless: str | None = None, where: Callable[[Any], bool] = lambda value: True) -> Feature:
    """A setting that is not null, and has a property; of a component, or a text, other than ``unless``."""

    def words(choice: Choice) -> str:
        value: Any = choice
        for key in path.split("."):
            value = getattr(value, key, None)
        name = value if isinstance(value, str) else value.component_name() if getattr(value, "home", "") else None
        if value is None or (unless is not None and name == unless) or not where(value):
            return ""
        return path if name is None else f"{path} '{name}'"

    return words


def algorithm(has: Callable[[Algorithm], bool]) -> Feature:
    """A property of methods, whose words are the method's name."""

    def words(choice: Choice) -> str:
        return f"algorithm '{choice.algorithm.component_name()}'" if has(choice.algorithm) else ""

    return words


late_replies = chosen("run.pace", where=lambda pace: isinstance(pace, Buffered))
virtual_times = chosen("run.pace.clients")
deployed = chosen("run.engine", where=lambda engine: engine.is_deployed)
measured_clients = chosen("run.evaluate_clients", where=lambda wanted: wanted is not False)
metrics_unsent = chosen("privacy.metrics", where=lambda metrics: metrics == "none")
initial_models = chosen("initial")
averaged_changes = chosen("algorithm.averaging", where=lambda rule: rule.is_of_changes)
compared_rows = chosen("algorithm.distiller.loss", where=lambda loss: loss == "similarity")
masked_sums = chosen("aggregation.secure")
robust_rule = chosen("aggregation.robust")
clipping = chosen("aggregation.clip")
sample_noise = chosen("privacy.samples")
public_samples = chosen("algorithm.public.samples")
sequential_mean = chosen("algorithm.averaging.mean", unless="exact")
weighed_by_content = chosen("algorithm.teacher.weights", unless="count")
alignment = chosen("algorithm.teacher.alignment")
unasked_clients = algorithm(lambda method: not method.asks_clients)
one_model_a_round = algorithm(lambda method: method.asks_clients and not method.takes_late_replies)
nothing_combined = algorithm(lambda method: not returned_bundles(method))
unsummed_method = algorithm(lambda method: not any(schema.mean_by for schema in steps_of(method).values()))
# what derives from a class that vouches for it may do more
unseen_learning = algorithm(lambda method: not vars(type(method)).get("learns_by_fit"))


def attackers(are: Callable[[Attack], bool]) -> Feature:
    """Attacks with a property, of which the first is named."""

    def words(choice: Choice) -> str:
        return next((f"run.attackers '{one.component_name()}'" for one in choice.run.attackers if are(one)), "")

    return words


any_attack = attackers(lambda attack: True)
falsified_replies = attackers(lambda attack: attack.falsifies)


def single_values(choice: Choice) -> str:
    """Steps whose replies hold more than a sum shows."""
    method = choice.algorithm
    for step, schema in steps_of(method).items():
        own = [
            field
            for field, declared in schema.returns.items()
            if schema.mean_by is None or (field != schema.mean_by and not _is_summed(declared))
        ]
        if schema.kind == "step" and (own or schema.others is not None):
            what = ", ".join(own) or "scalars"
            return f"algorithm '{method.component_name()}', which needs {what} of each client in its step '{step}'"
    return ""


CONFLICTS: tuple[tuple[Feature, Feature, str], ...] = (
    (deployed, virtual_times, "a deployment has a real clock; leave the times out"),
    (deployed, any_attack, "sites do not attack, and are not ours to corrupt; leave the attackers out"),
    (deployed, initial_models, "clients' models are at their sites; leave that out"),
    (chosen("privacy"), initial_models, "no epsilon covers what these have learnt of the same data; leave the one out"),
    (late_replies, unasked_clients, "it asks no client; set run.pace to sync"),
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
    (masked_sums, averaged_changes, "a change B A is of each client's own factors; choose separate"),
    (masked_sums, compared_rows, "the server learns from the rows of each client; choose another loss"),
    (masked_sums, unsummed_method, "as it is set, it needs each client's reply; choose a method that averages"),
    (masked_sums, single_values, "only sums are seen; choose a method that only averages"),
    (masked_sums, robust_rule, "a rule compares single replies; choose one of the two"),
    (masked_sums, clipping, "it looks at each reply; set it to null"),
    (
        sample_noise,
        unseen_learning,
        "its clients may learn of private data outside client.fit, which DP-SGD does not see; choose fedavg, fedet or "
        "fedmkd, or protect the reply (privacy.reply)",
    ),
    (
        metrics_unsent,
        measured_clients,
        "metrics of clients' test samples are sent as they are; set run.evaluate_clients: false, or accept it with "
        "privacy.metrics: clear",
    ),
)
"""In the order of reports: conflicts of settings come before limits of a method."""


def conflicts(choice: Choice) -> Iterator[str]:
    """Conflicts of a choice, one line each."""
    for one, other, reason in CONFLICTS:
        if (first := one(choice)) and (second := other(choice)):
            yield f"{first} does not go with {second}: {reason}"


def returned_bundles(method: Algorithm) -> set[type[TensorBundle]]:
    """Types of tensors that a method's clients send in its rounds."""
    schemas = [schema for schema in steps_of(method).values() if schema.kind != "fresh"]
    returned = {part for schema in schemas for declared in schema.returns.values() for part in _parts(declared)}
    return {part for part in returned if isinstance(part, type) and issubclass(part, TensorBundle)}


def _is_summed(declared: Declared) -> bool:
    return all(isinstance(part, type) and issubclass(part, TensorBundle) for part in _parts(declared))


def _parts(declared: Declared) -> tuple[object, ...]:
    return typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)
