"""What re-training some layers of a trained model on private data does to it everywhere (FedAID, Appendix A)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor

from polyfed.analysis.depth import chosen
from polyfed.analysis.simulated import Simulated, Subject, only
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.data.union import union
from polyfed.federation.membership import Member
from polyfed.federation.settings import TrainingSettings
from polyfed.optim.settings import Schedule

EACH, UNION = "each", "union"

Figures = Mapping[str, Mapping[str, float]]
"""Client -> figure (``R@1``) -> value."""


@dataclass(frozen=True)
class Plan:
    """How a model is re-trained.

    Attributes:
        layers: ``all``, ``shallow`` or ``deep``.
        depth: number of shallow layers, for all modalities or by modality; None: half of each encoder's.
        steps: optimiser steps; None with ``epochs``.
        epochs: passes over the samples, unless ``steps`` says how many batches.
        lr: constant learning rate; None: the clients' own, by their schedule.
        seed: of batches and dropout; None: the run's.
    """

    layers: str = "all"
    depth: int | Mapping[str, int] | None = None
    steps: int | None = 500
    epochs: int = 1
    lr: float | None = None
    seed: int | None = None

    def training(self, settings: TrainingSettings) -> TrainingSettings:
        """A client's training settings with the learning rate of the plan."""
        if self.lr is None:
            return settings
        optimizer = settings.optimizer.model_copy(update={"lr": self.lr})
        return settings.model_copy(update={"optimizer": optimizer, "schedule": Schedule()})


@dataclass(frozen=True)
class Retrained:
    """One model before and after it was re-trained.

    Attributes:
        of: name of the model.
        round: after which its weights were.
        on: the client whose data it saw, or ``union``.
        steps: optimiser steps that were done.
        before, after: figures at every client.
    """

    of: str
    round: int
    on: str
    steps: int
    before: Figures
    after: Figures

    def change(self, client: str, figure: str) -> float:
        """After minus before."""
        return self.after[client][figure] - self.before[client][figure]


@dataclass(frozen=True)
class Retraining:
    """What re-training did in a run.

    Attributes:
        run: its name.
        plan: how.
        trained: number of parameters that were trained.
        clients: who judged, in client order.
        rows: one for each model and each set of samples.
    """

    run: str
    plan: Plan
    trained: int
    clients: tuple[str, ...]
    rows: tuple[Retrained, ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures."""
        return tuple(self.rows[0].before[self.clients[0]])

    def to_json(self) -> dict[str, Any]:
        """All figures, with their unweighted mean over clients."""
        plan = {name: getattr(self.plan, name) for name in ("layers", "depth", "steps", "lr", "seed")}
        return {"run": self.run, **plan, "parameters": self.trained, "rows": [_row_json(row) for row in self.rows]}


def mean_of(found: Figures, figure: str) -> float:
    """Unweighted mean of a figure over the clients."""
    return fmean(each[figure] for each in found.values())


def run_retraining(opened: Simulated, of: str, on: str, plan: Plan | None = None) -> Retraining:
    """Re-train a part of a model with the clients' own task, the rest frozen, and judge it at every client.

    Batches are drawn, and learning rates are, as in the round after the model's last. The optimiser is new.

    Args:
        opened: the run.
        of: ``server``, a client that keeps a model, a type of clients, or ``each`` for all kept models.
        on: a client, ``each`` client in turn, or the ``union`` of their training samples, with the settings of the
            first.
        plan: which layers, and how long.

    Raises:
        ConfigError: no such model, client or layers, a number is out of range, or there is nothing to train.
        RunError: a model is missing or damaged.
    """
    plan = plan or Plan()
    rows: list[Retrained] = []
    with cpu_threads(opened.experiment.run.threads):
        members = _judges(opened, of, on)
        for subject in _subjects(opened, of):
            work, before = Work(opened, subject, plan), opened.figures(subject, members)
            for name, samples, training in _sets(opened, subject, members, on):
                with work.retrained(name, samples, training) as steps:
                    after = opened.figures(subject, members)
                rows.append(Retrained(subject.name, subject.round, name, steps, before, after))
    return Retraining(opened.run.name, plan, work.trained, tuple(members), tuple(rows))


@dataclass
class Work:
    """Trains one model again and again, each time from where it was.

    Attributes:
        opened: the run.
        subject: the model.
        plan: which layers, and how long.

    Raises:
        ConfigError: nothing would be trained, or a number of the plan is out of range.
    """

    opened: Simulated
    subject: Subject
    plan: Plan
    names: frozenset[str] = field(init=False)
    trained: int = field(init=False)
    _start: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        _require_range(self.plan)
        model = self.subject.model
        self.names = chosen(model, self.plan.layers, self.plan.depth)
        own = [value for name, value in model.named_parameters() if name in self.names and value.requires_grad]
        self.trained = sum(value.numel() for value in own)
        if not own:
            raise ConfigError(f"--layers {self.plan.layers}: '{self.subject.name}' has no parameters to train in them")
        self._start = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @contextlib.contextmanager
    def retrained(self, name: str, samples: Samples, training: TrainingSettings) -> Iterator[int]:
        """Within the block the model is re-trained on the samples of ``name``; gives the steps that were done.

        Raises:
            DataError: there is no batch to train on.
        """
        plan, model = self.plan, self.subject.model
        participant = self.opened.participant(self.subject, name, plan.training(training), plan.seed)
        try:
            # what a simulated client's first step of that round would draw
            with isolated(participant.clock.seed, participant.clock.round, name, "fit", 0), only(model, self.names):
                done = 0 if plan.steps == 0 else participant.fit(samples, epochs=plan.epochs, steps=plan.steps)
            if not done and plan.steps != 0:
                raise DataError(f"the {len(samples)} samples of '{name}' make no batch to train on; leave it out")
            model.zero_grad(set_to_none=True)
            model.eval()
            yield done
        finally:
            model.load_state_dict(self._start)


def _subjects(opened: Simulated, of: str) -> Iterator[Subject]:
    if of != EACH:
        yield opened.subject(of)
        return
    if not opened.keepers:
        raise ConfigError(f"--of each: clients of '{opened.run.folder}' keep no models; give --of server")
    for client in opened.keepers:
        yield opened.kept(client)


def _sets(
    opened: Simulated, subject: Subject, members: Mapping[str, Member], on: str
) -> Iterator[tuple[str, Samples, TrainingSettings]]:
    """What is trained on: name, samples and training settings."""
    if on == UNION:
        together = union([opened.train(subject, member) for member in members.values()])
        yield UNION, together, next(iter(members.values())).settings.training
        return
    for name in members if on == EACH else [on]:
        yield name, opened.train(subject, members[name]), members[name].settings.training


def _require_range(plan: Plan) -> None:
    if plan.steps is not None and plan.steps < 0:
        raise ConfigError(f"--steps {plan.steps}: give 0 or more")
    if plan.lr is not None and not 0 < plan.lr <= 100:
        raise ConfigError(f"--lr {plan.lr:g}: give a number above 0 and at most 100")


def _judges(opened: Simulated, of: str, on: str) -> dict[str, Member]:
    """The clients that all models are judged at."""
    judges = {subject.name: opened.comparable(subject) for subject in _subjects(opened, of)}
    first, members = next(iter(judges.items()))
    other = next((name for name, found in judges.items() if found.keys() != members.keys()), None)
    if other is not None:
        raise ConfigError(
            f"--of each: '{first}' and '{other}' differ in task, modalities or classes, so that no client can judge "
            "both; name one client at a time"
        )
    if on not in (EACH, UNION, *members):
        raise ConfigError(f"--on {on}: no client of the task of '{first}'; {nearest(on, [EACH, UNION, *members])}")
    return members


def _row_json(row: Retrained) -> dict[str, Any]:
    mean = {name: mean_of(row.after, name) for name in next(iter(row.after.values()))}
    before = {name: mean_of(row.before, name) for name in mean}
    plain = {name: getattr(row, name) for name in ("of", "round", "on", "steps", "before", "after")}
    return plain | {"mean": {"before": before, "after": mean}}
