"""What can be known of secure sums before a run begins: who would need the replies that they hide."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType

from polyfed.aggregation.weighting import Weighting
from polyfed.core.errors import ConfigError
from polyfed.federation.attack import Conspiracy
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import TensorBundle
from polyfed.wire.schema import Declared, steps_of

_UNBOUNDED = "run.bounds.update=null, refuse=null, size=null and weight=null"


def require_summable(experiment: Experiment) -> None:
    """Check that nothing needs a client's own reply where ``aggregation.secure`` gives only sums.

    Raises:
        ConfigError: something does, or what the sums take is not installed.
    """
    rule = experiment.aggregation.secure
    if rule is None:
        return
    rule.require()
    for reason in (*_reasons_of_method(experiment), *_reasons_of_run(experiment)):
        raise ConfigError(f"aggregation.secure '{rule.component_name()}' hides each client's reply, and {reason}")


def _reasons_of_method(experiment: Experiment) -> Iterator[str]:
    method = experiment.algorithm
    name, summed = method.component_name(), method.summed
    averaging = getattr(method, "averaging", None)
    if getattr(averaging, "mean", "exact") != "exact":
        yield "algorithm.averaging.mean 'sequential' takes them one after the other; set it to exact"
    if getattr(method, "largest_norm", None) is not None and summed:
        yield "algorithm.largest_norm compares the rows of clients; set it to null"
    weighting = getattr(method, "aggregation", None)
    if isinstance(weighting, Weighting) and weighting.component_name() != "count":
        yield f"algorithm.aggregation '{weighting.component_name()}' weighs clients by what each sends; choose count"
    if getattr(method, "alignment", "none") != "none":
        yield "algorithm.alignment maps the representations of each client; set it to none"
    if getattr(method, "judge_clients", False):
        yield "algorithm.judge_clients looks at the representations of each client; set it to false"
    if not summed:
        yield f"'{name}', as it is set, needs each of them; choose a method that averages, or leave it out"
    for step, schema in steps_of(method).items():
        sent = [field for field, kind in schema.returns.items() if not (step in summed and _is_summed(kind))]
        individual = [field for field in sent if step not in summed or field != summed[step]]
        if schema.kind == "step" and (individual or schema.others is not None):
            what = ", ".join(individual) or "scalars"
            yield f"'{name}' needs {what} of each client in its step '{step}'; choose a method that only averages"


def _is_summed(kind: Declared) -> bool:
    kinds = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return all(issubclass(one, TensorBundle) for one in kinds)


def _reasons_of_run(experiment: Experiment) -> Iterator[str]:
    robust, run = experiment.aggregation.robust, experiment.run
    if robust is not None:
        yield f"aggregation.robust '{robust.component_name()}' compares them; choose one of the two"
    if run.bounds.bind or run.bounds.weight is not None:
        yield f"run.bounds looks at each; set {_UNBOUNDED}"
    if run.transport.refers:
        yield "run.transport.topk and unchanged encode each against its request; leave them out"
    for attack in run.attackers:
        if isinstance(attack, Conspiracy):
            yield f"run.attackers '{attack.component_name()}' changes what was sent; choose an attack of single clients"
