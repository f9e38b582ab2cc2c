"""What can be known before a run of whether its server may take steps before all have replied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyfed.core.errors import ConfigError
from polyfed.federation.client import ClientInfo
from polyfed.federation.group_sums import mask_groups
from polyfed.federation.paces import LatePace, Pace
from polyfed.federation.replayed_time import ReplayedTime
from polyfed.federation.secure_ask import require_several
from polyfed.federation.types import by_architecture
from polyfed.privacy.rules import RobustRule
from polyfed.wire.schema import steps_of

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment


def require_pace(experiment: Experiment) -> None:
    """Check that nothing needs all replies of a round to be to that round's requests, where some are late.

    Raises:
        ConfigError: something does, or there is no virtual time to set.
    """
    pace, run = experiment.run.pace, experiment.run
    if run.engine.is_deployed:
        require_real_clock(pace)
    if isinstance(pace, LatePace):
        for reason in (*_of_method(experiment), *_of_run(experiment, pace)):
            raise ConfigError(f"run.pace '{pace.component_name()}' gives the server late replies, and {reason}")


def require_real_clock(pace: Pace) -> None:
    """Check that a pace suits a deployment.

    Raises:
        ConfigError: it sets virtual times.
    """
    if pace.clients is not None:
        raise ConfigError("run.pace.clients: a deployment has a real clock; leave it out")
    if isinstance(pace, LatePace) and pace.replay is not None:
        raise ConfigError("run.pace.replay: a deployment has a real clock; replay it in a simulation")


def require_paced_clients(experiment: Experiment, clients: tuple[ClientInfo, ...]) -> None:
    """Check that a run's pace suits its clients.

    Raises:
        ConfigError: it does not.
    """
    pace = experiment.run.pace
    pace.require(clients)
    if pace.clients is not None:
        pace.clients.of(clients, experiment.run.seed)
    if isinstance(pace, LatePace):
        _require_quorums(experiment, pace.most(clients))


def require_paced_types(experiment: Experiment, clients: tuple[ClientInfo, ...]) -> None:
    """Check that a step of a run's pace has enough replies of each type of its clients.

    Raises:
        ConfigError: it has not.
    """
    if isinstance(pace := experiment.run.pace, LatePace):
        if experiment.aggregation.secure is not None:
            _require_groups(pace, clients)
        if experiment.aggregation.robust is not None:
            _require_honest(experiment.aggregation.robust, pace, clients)


def require_replay(pace: Pace, clients: tuple[ClientInfo, ...]) -> None:
    """Check that what a pace replays was recorded of these clients.

    Raises:
        ConfigError: it was not, or there is no such file.
    """
    if isinstance(pace, LatePace) and pace.replay is not None:
        ReplayedTime.read(pace.replay, clients)


def _require_groups(pace: LatePace, clients: tuple[ClientInfo, ...]) -> None:
    groups = mask_groups(clients, pace.most(clients))
    for group in groups:
        require_several(group, f"in groups of {len(group)} (raise run.pace.replies for larger ones)")
    largest = max(map(len, groups))
    if pace.concurrency is not None and pace.concurrency < largest:
        raise ConfigError(f"run.pace.concurrency is {pace.concurrency}, and aggregation.secure asks {largest} at once")


def _require_honest(rule: RobustRule, pace: LatePace, clients: tuple[ClientInfo, ...]) -> None:
    """All false clients of a type may be among those who reply first."""
    for members in by_architecture(clients).values():
        false, fewest = rule.false_clients(len(members)), pace.fewest(members, clients)
        if fewest < rule.required(false):
            raise ConfigError(
                f"aggregation.robust '{rule.component_name()}' that tolerates {false} of {len(members)} clients of "
                f"type '{members[0].group}' needs {rule.required(false)} replies of it, and a step of run.pace "
                f"'{pace.component_name()}' is sure of {fewest}; set it to buffered with more replies, by modality "
                "where there are several types, or to sync"
            )


def _require_quorums(experiment: Experiment, most: int) -> None:
    pace = experiment.run.pace.component_name()
    for key, quorum in experiment.run.quorums.items():
        if quorum > most:
            raise ConfigError(
                f"run.{key} is {quorum}, but a round of run.pace '{pace}' ends after {most} at the latest; "
                f"give {most} or fewer, or a share of them (up to 1.0)"
            )


def _of_method(experiment: Experiment) -> Iterator[str]:
    method = experiment.algorithm
    name, steps = method.component_name(), [key for key, own in steps_of(method).items() if own.kind == "step"]
    if not method.asks_clients:
        yield f"'{name}' asks nobody; set it to sync"
    elif not method.takes_late_replies:
        several = len(steps) > 1
        why = f"asks the same clients for {' and '.join(steps)}" if several else "needs all of them from one model"
        yield f"a round of '{name}' {why}; set it to sync, or choose fedavg or creamfl"
    if getattr(getattr(method, "public", None), "samples", None) is not None:
        yield "with algorithm.public.samples each round's are of other public samples; leave that out"
    if getattr(getattr(method, "averaging", None), "mean", "exact") != "exact":
        yield "algorithm.averaging.mean 'sequential' needs to know whose come; set that to exact"


def _of_run(experiment: Experiment, pace: LatePace) -> Iterator[str]:
    secure, robust = experiment.aggregation.secure, experiment.aggregation.robust
    if secure is not None:
        drawn = "run.sampling.cohort draws other clients each round; leave it out"
        reason = pace.no_groups or (drawn if experiment.run.sampling.cohort is not None else None)
        if reason is not None:
            yield f"aggregation.secure '{secure.component_name()}' sums those of fixed groups of clients: {reason}"
    if robust is not None and experiment.run.sampling.cohort is not None:
        yield f"aggregation.robust '{robust.component_name()}' needs many of a type: leave run.sampling.cohort out"
