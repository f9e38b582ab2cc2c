"""What can be known of secure sums before a run begins: who would need the replies that they hide."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType

from polyfed.algorithms.algorithm import Algorithm
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.federation.false_replies import Conspiracy
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import TensorBundle
from polyfed.wire.schema import Declared, StepSchema, steps_of


def require_summable(experiment: Experiment) -> None:
    """Check that nothing needs a client's own reply where ``aggregation.secure`` gives only sums.

    Raises:
        ConfigError: something does, or what the sums take is not installed.
    """
    rule = experiment.aggregation.secure
    if rule is None:
        return
    rule.require()
    for reason in (*needs_single_replies(experiment.algorithm), *_reasons_of_run(experiment)):
        raise ConfigError(f"aggregation.secure '{rule.component_name()}' hides each client's reply, and {reason}")


def needs_single_replies(method: Algorithm) -> Iterator[str]:
    """Why a method, as it is set, needs the reply of each client, in words; nothing if sums are enough."""
    name, summed = method.component_name(), method.summed
    yield from _reasons_of_settings(method)
    if not summed:
        yield f"'{name}', as it is set, needs each of them; choose a method that averages, or leave it out"
    for step, schema in steps_of(method).items():
        individual = _individual(schema, summed[step]) if step in summed else list(schema.returns)
        if schema.kind == "step" and (individual or schema.others is not None):
            what = ", ".join(individual) or "scalars"
            yield f"'{name}' needs {what} of each client in its step '{step}'; choose a method that only averages"


def _reasons_of_settings(method: Algorithm) -> Iterator[str]:
    """Settings that several methods have, and that look at single replies."""
    teacher = getattr(method, "teacher", None)
    if isinstance(teacher, Teacher):
        yield from _reasons_of_teacher(teacher)
    if getattr(getattr(method, "averaging", None), "mean", "exact") != "exact":
        yield "algorithm.averaging.mean 'sequential' takes them one after the other; set it to exact"
    if getattr(method, "largest_norm", None) is not None:
        yield "algorithm.largest_norm compares the rows of clients; set it to null"


def _reasons_of_teacher(teacher: Teacher) -> Iterator[str]:
    if teacher.weights.component_name() != "count":
        name = teacher.weights.component_name()
        yield f"algorithm.teacher.weights '{name}' weighs clients by what each sends; choose count"
    if teacher.alignment is not None:
        yield "algorithm.teacher.alignment maps the representations of each client; set it to null"
    if teacher.judge_clients:
        yield "algorithm.teacher.judge_clients looks at the representations of each client; set it to false"


def _individual(schema: StepSchema, weight: str | None) -> list[str]:
    """Fields of a reply that are not in its sum."""
    return [field for field, kind in schema.returns.items() if field != weight and not _is_summed(kind)]


def _is_summed(kind: Declared) -> bool:
    kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return all(issubclass(one, TensorBundle) for one in kinds)


def _reasons_of_run(experiment: Experiment) -> Iterator[str]:
    robust, run = experiment.aggregation.robust, experiment.run
    if robust is not None:
        yield f"aggregation.robust '{robust.component_name()}' compares them; choose one of the two"
    if experiment.aggregation.clip is not None:
        yield "aggregation.clip looks at each; set it to null"
    if run.transport.refers:
        yield "run.transport.topk and unchanged encode each against its request; leave them out"
    for attack in run.attackers:
        if isinstance(attack, Conspiracy):
            yield f"run.attackers '{attack.component_name()}' changes what was sent; choose an attack of single clients"
