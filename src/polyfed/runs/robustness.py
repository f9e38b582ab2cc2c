"""What can be known of robust aggregation before a run begins."""

from __future__ import annotations

import typing
from types import UnionType

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.federation.client import ClientInfo
from polyfed.federation.robust_replies import require_enough
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import TensorBundle, Weights
from polyfed.wire.schema import Declared, steps_of


def require_robust(experiment: Experiment) -> None:
    """Check that the method has replies that ``aggregation.robust`` can combine.

    Raises:
        ConfigError: it has none, or of another kind than the rule takes.
    """
    rule, method = experiment.aggregation.robust, experiment.algorithm
    if rule is None:
        return
    name, sent = method.component_name(), returned_bundles(experiment)
    if not sent:
        raise ConfigError(
            f"aggregation.robust '{rule.component_name()}' has no effect: clients of '{name}' send nothing that is "
            "combined; leave it out"
        )
    if rule.rows_only and Weights in sent:
        raise ConfigError(
            f"aggregation.robust '{rule.component_name()}' weighs rows, but clients of '{name}' send weights; choose "
            "median, trimmed_mean, geometric_median, krum, multi_krum or clip"
        )
    if getattr(method, "alignment", "none") != "none":
        raise ConfigError(
            "aggregation.robust compares what clients send, and with algorithm.alignment "
            f"'{method.alignment}' each sends in a space of its own; set algorithm.alignment=none"  # type: ignore[attr-defined]
        )


def require_cohorts(experiment: Experiment, clients: tuple[ClientInfo, ...]) -> None:
    """Check that each round's cohort has enough clients of each type for ``aggregation.robust``.

    Raises:
        ConfigError: naming the first round, the type and its clients.
    """
    rule, run = experiment.aggregation.robust, experiment.run
    if rule is None:
        return
    for number in range(1, 2 if run.sampling.cohort is None else run.rounds + 1):
        cohort = run.sampling.draw(clients, generator(run.seed, number, "cohort"))
        require_enough(rule, cohort, f"round {number}")


def returned_bundles(experiment: Experiment) -> set[type[TensorBundle]]:
    """Kinds of tensors that a method's clients send in its rounds."""
    kinds: set[type[TensorBundle]] = set()
    for schema in steps_of(experiment.algorithm).values():
        for declared in schema.returns.values() if schema.kind != "fresh" else ():
            kinds |= {kind for kind in _kinds(declared) if isinstance(kind, type) and issubclass(kind, TensorBundle)}
    return kinds


def _kinds(declared: Declared) -> tuple[object, ...]:
    return typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)
