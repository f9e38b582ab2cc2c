"""What re-training some layers of a trained model on private data does to it everywhere (FedAID, Appendix A)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.data.union import union
from polyfed.federation.membership import Member
from polyfed.federation.settings import TrainingSettings
from polyfed.lab.analysis.depth import chosen_tensors
from polyfed.lab.analysis.drawing import Matrix
from polyfed.lab.analysis.judgements import SHOWN_FIGURES, Figures, client_matrix, names_of, with_mean
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.simulated import Simulated, TrainedModel, training_alone
from polyfed.optim.settings import Schedule
from polyfed.reporting.tables import count

EACH, UNION = "each", "union"


@dataclass(frozen=True)
class Plan:
    """How a model is re-trained.

    Attributes:
        layers: ``all``, ``shallow`` or ``deep``.
        depth: number of shallow layers, for all modalities or by modality; None: half of each encoder's.
        steps: optimiser steps; None: ``epochs`` passes over the samples.
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
        if self.lr is None:
            return settings
        optimizer = settings.optimizer.model_copy(update={"lr": self.lr})
        return settings.model_copy(update={"optimizer": optimizer, "schedule": Schedule()})


@dataclass(frozen=True)
class Retrained:
    """Figures at every client before and after model ``of`` was trained on a client's data, or the ``union``."""

    of: str
    round: int
    on: str
    steps: int
    before: Figures
    after: Figures


class Retrainer:
    """Trains one model again and again, each time from where it was.

    Raises:
        ConfigError: nothing would be trained.
    """

    def __init__(self, opened: Simulated, trained: TrainedModel, plan: Plan) -> None:
        model = trained.model
        self._opened, self._trained, self._plan = opened, trained, plan
        self.names = chosen_tensors(model, plan.layers, plan.depth)
        own = [value for name, value in model.trained().items() if name in self.names]
        if not own:
            raise ConfigError(f"--layers {plan.layers}: '{trained.name}' has no parameters to train in them")
        self.parameters = sum(value.numel() for value in own)
        self._start = {name: value.detach().clone() for name, value in model.exchanged().items()}

    @contextlib.contextmanager
    def retrained(self, name: str, samples: Samples, training: TrainingSettings) -> Iterator[int]:
        """Within the block the model is re-trained on the samples of ``name``; gives the steps that were done.

        Raises:
            DataError: there is no batch to train on.
        """
        plan, model = self._plan, self._trained.model
        participant = self._opened.participant(self._trained, name, plan.training(training), plan.seed)
        try:
            # what a simulated client's first step of that round would draw
            with (
                isolated(participant.clock.seed, participant.clock.round, name, "fit", 0),
                training_alone(model, self.names),
            ):
                done = 0 if plan.steps == 0 else participant.fit(samples, epochs=plan.epochs, steps=plan.steps)
            if not done and plan.steps != 0:
                raise DataError(f"the {len(samples)} samples of '{name}' make no batch to train on; leave it out")
            model.zero_grad(set_to_none=True)  # memory that judging has better use for
            model.eval()
            yield done
        finally:
            model.load(self._start)

    def rows(
        self, members: Mapping[str, Member], on: str, figures: Callable[[], Figures] | None = None
    ) -> Iterator[Retrained]:
        """The model before and after it was re-trained on each set of samples.

        Args:
            members: clients that judge.
            on: a client, ``each`` client in turn, or the ``union`` of them.
            figures: what they find of the model as it is; None: their test figures.
        """
        trained, measure = self._trained, figures or partial(self._opened.figures, self._trained, members)
        before = measure()
        for name, samples, training in _sets(self._opened, trained, members, on):
            with self.retrained(name, samples, training) as steps:
                after = measure()
            yield Retrained(trained.name, trained.round, name, steps, before, after)


def run_retraining(opened: Simulated, of: str, on: str, plan: Plan) -> AnalysisResult:
    """Re-train a part of a model with the clients' own task, the rest frozen, and judge it at every client.

    Batches are drawn, and learning rates are, as in the round after the model's last. The optimiser is new.

    Raises:
        ConfigError: no such model, client or layers, or there is nothing to train.
        RunError: a model is missing or damaged.
    """
    rows: list[Retrained] = []
    with cpu_threads(opened.experiment.run.threads):  # as in the run, whose sums depend on their number
        members = _judges(opened, of, on)
        for trained in _models(opened, of):
            retrainer = Retrainer(opened, trained, plan)
            rows += retrainer.rows(members, on)
    name, asked = opened.run.name, {key: getattr(plan, key) for key in ("layers", "depth", "steps", "lr", "seed")}
    content = {"run": name, **asked, "parameters": retrainer.parameters, "rows": list(map(_content, rows))}
    return AnalysisResult.of_matrices(name, content, _matrices(name, plan.layers, retrainer.parameters, rows))


def _models(opened: Simulated, of: str) -> Iterator[TrainedModel]:
    if of == EACH and not opened.keepers:
        raise ConfigError(f"--of each: clients of '{opened.run.folder}' keep no models; give --of server")
    return map(opened.kept, opened.keepers) if of == EACH else iter([opened.trained(of)])


def _sets(
    opened: Simulated, trained: TrainedModel, members: Mapping[str, Member], on: str
) -> Iterator[tuple[str, Samples, TrainingSettings]]:
    if on == UNION:
        together = union([opened.train(trained, member) for member in members.values()])
        yield UNION, together, next(iter(members.values())).settings.training
        return
    for name in members if on == EACH else [on]:
        yield name, opened.train(trained, members[name]), members[name].settings.training


def _judges(opened: Simulated, of: str, on: str) -> dict[str, Member]:
    """The clients that all models are judged at."""
    judges = {trained.name: opened.require_judges(trained) for trained in _models(opened, of)}
    first, members = next(iter(judges.items()))
    for other, others in judges.items():
        if others.keys() != members.keys():
            raise ConfigError(
                f"--of each: '{first}' and '{other}' differ in task, modalities or classes, so that no client can "
                "judge both; name one client at a time"
            )
    if on not in (EACH, UNION, *members):
        raise ConfigError(f"--on {on}: no client of the task of '{first}'; {nearest(on, [EACH, UNION, *members])}")
    return members


# ---- what is shown


def _content(row: Retrained) -> dict[str, Any]:
    def means(figures: Figures) -> dict[str, float]:
        return {name: with_mean(figures, name)[-1] for name in names_of(figures)}

    return vars(row) | {"mean": {"before": means(row.before), "after": means(row.after)}}


def _matrices(run: str, layers: str, parameters: int, rows: Sequence[Retrained]) -> list[Matrix]:
    """One a figure: each model before, then after it was re-trained on each set."""
    models: list[tuple[str, Figures]] = []
    for (of, number, before), again in groupby(rows, key=lambda row: (row.of, row.round, row.before)):
        models.append((f"{of}, round {number}", before))
        models += [(f"{of}, on {row.on}, {row.steps} steps", row.after) for row in again]
    note = f"Re-trained: {count(parameters)} parameters ({layers} layers)."
    return [client_matrix(run, name, models, (note,)) for name in names_of(rows[0].before)[:SHOWN_FIGURES]]
