"""What can be known of robust aggregation and of attackers before a run begins."""

from __future__ import annotations

import typing
from types import UnionType

from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.engines.colluding import ColludingEngine
from polyfed.federation.attack import attacks_by_client
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Engine
from polyfed.federation.false_replies import Conspiracy
from polyfed.federation.population import Population
from polyfed.federation.robust_replies import require_enough
from polyfed.federation.secure_ask import require_several
from polyfed.privacy.rules import RobustRule
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import TensorBundle, Weights
from polyfed.wire.schema import Declared, steps_of


def require_robust(experiment: Experiment) -> None:
    """Check that the method has replies that ``aggregation.robust`` can combine.

    Raises:
        ConfigError: it has none, or of another kind than the rule takes.
    """
    if experiment.aggregation.robust is not None:
        require_combinable(experiment.aggregation.robust, experiment.algorithm)


def require_combinable(rule: RobustRule, method: Algorithm) -> None:
    """Check that a method, as it is set, has replies that a rule can combine.

    Raises:
        ConfigError: it has none, or of another kind than the rule takes.
    """
    name, sent = method.component_name(), returned_bundles(method)
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
    teacher = getattr(method, "teacher", None)
    if isinstance(teacher, Teacher) and teacher.alignment is not None:
        raise ConfigError(
            "aggregation.robust compares what clients send, and with algorithm.teacher.alignment "
            f"'{teacher.alignment.kind}' each sends in a space of its own; set algorithm.teacher.alignment=null"
        )


def require_cohorts(experiment: Experiment, clients: tuple[ClientInfo, ...]) -> None:
    """Check that each round's cohort has enough clients of each type for ``aggregation.robust``, or ``secure``.

    Raises:
        ConfigError: naming the first round, the type and its clients.
    """
    rule, secure, run = experiment.aggregation.robust, experiment.aggregation.secure, experiment.run
    if rule is None and secure is None:
        return
    for number in range(1, 2 if run.sampling.cohort is None else run.rounds + 1):
        cohort = run.sampling.draw(clients, generator(run.seed, number, "cohort"))
        if rule is not None:
            require_enough(rule, cohort, f"round {number}")
        if secure is not None:
            require_several(cohort, f"round {number}")


def returned_bundles(method: Algorithm) -> set[type[TensorBundle]]:
    """Kinds of tensors that a method's clients send in its rounds."""
    kinds: set[type[TensorBundle]] = set()
    for schema in steps_of(method).values():
        for declared in schema.returns.values() if schema.kind != "fresh" else ():
            kinds |= {kind for kind in _kinds(declared) if isinstance(kind, type) and issubclass(kind, TensorBundle)}
    return kinds


def _kinds(declared: Declared) -> tuple[object, ...]:
    return typing.get_args(declared) if isinstance(declared, UnionType) else (declared,)


def require_attackers(experiment: Experiment, federation: Population) -> None:
    """Check that ``run.attackers`` are clients of this simulation and can attack as they are to.

    Raises:
        ConfigError: they are not or cannot, or the run is a deployment.
    """
    run = experiment.run
    if not run.attackers:
        return
    if not federation.members:
        raise ConfigError("run.attackers: there are no clients in 'clients' who could attack; leave it out")
    attacks = attacks_by_client(run.attackers, federation.infos, run.seed)
    for attack in run.attackers:
        own = [member for name, member in federation.members.items() if attacks.get(name) is attack]
        attack.require(own, federation.infos)
        for member in () if attack.falsifies else own:
            split = federation.data.split(member.settings.source, member.settings.split)
            attack.poisoned(federation.train(member), member, split, run.seed)  # what is not there fails here
        if attack.falsifies and not returned_bundles(experiment.algorithm):
            raise ConfigError(
                f"run.attackers '{attack.component_name()}' has no effect: clients of "
                f"'{experiment.algorithm.component_name()}' send nothing to falsify; choose label_flip"
            )


def with_conspirators(engine: Engine, experiment: Experiment) -> Engine:
    """The engine, with the attackers who agree on what they send."""
    run = experiment.run
    attacks = attacks_by_client(run.attackers, engine.clients(), run.seed) if run.attackers else {}
    agreed = {name: attack for name, attack in attacks.items() if isinstance(attack, Conspiracy)}
    if not agreed:
        return engine
    return ColludingEngine(engine, agreed, steps_of(experiment.algorithm), run.transport, run.limits)
