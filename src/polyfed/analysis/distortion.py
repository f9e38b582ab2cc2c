"""How a round's local training distorts the alignment of modalities, client by client (FedAID, tables 6, 9 and 11)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import torch

from polyfed.analysis.retraining import Figures, Plan, Work, mean_of
from polyfed.analysis.simulated import Simulated, Subject
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.federation.participant import Participant
from polyfed.runs.experiment import Experiment
from polyfed.runs.records import SERVER


@dataclass(frozen=True)
class Seen:
    """A model at every client.

    Attributes:
        similarity: client -> mean cosine of the representations of a sample in two modalities.
        figures: client -> recalls, or the task's metric.
    """

    similarity: Mapping[str, float]
    figures: Figures

    def to_json(self) -> dict[str, Any]:
        """Both, with the means over clients."""
        mean = {name: mean_of(self.figures, name) for name in next(iter(self.figures.values()))}
        return {"similarity": dict(self.similarity), "figures": dict(self.figures), "mean": mean}


@dataclass(frozen=True)
class Distortion:
    """What local training does to a global model.

    Attributes:
        run: name of the run.
        of: the model.
        round: after which its weights are.
        steps: client -> optimiser steps of its local training.
        before: the model.
        after: client that trained it -> the model then.
    """

    run: str
    of: str
    round: int
    steps: Mapping[str, int]
    before: Seen
    after: Mapping[str, Seen]

    @property
    def clients(self) -> tuple[str, ...]:
        """Who trained and judged, in client order."""
        return tuple(self.after)

    def decrease(self, trained: str, judged: str) -> float:
        """By how much the similarity at ``judged`` falls when ``trained`` trains; positive is distortion."""
        return self.before.similarity[judged] - self.after[trained].similarity[judged]

    def mean_decrease(self, judged: str) -> float:
        """The mean over all who train."""
        return fmean(self.decrease(trained, judged) for trained in self.clients)

    def mean_figure(self, judged: str, figure: str) -> float:
        """Mean of a figure at a client over all trained models."""
        return fmean(seen.figures[judged][figure] for seen in self.after.values())

    def to_json(self) -> dict[str, Any]:
        """All figures; ``decrease`` by who trained, then by who judged."""
        decrease = {a: {b: self.decrease(a, b) for b in self.clients} for a in self.clients}
        return {
            "run": self.run,
            "of": self.of,
            "round": self.round,
            "steps": dict(self.steps),
            "decrease": decrease,
            "mean_decrease": {client: self.mean_decrease(client) for client in self.clients},
            "before": self.before.to_json(),
            "after": {client: seen.to_json() for client, seen in self.after.items()},
        }


def run_distortion(
    opened: Simulated, of: str = SERVER, *, steps: int | None = None, lr: float | None = None, seed: int | None = None
) -> Distortion:
    """Let every client train a model on its task alone, and compare what becomes of it at every client.

    Similarity is the mean over a client's test samples, and over pairs of modalities, of the cosine between the two
    representations. Training is that of the round after the model's last, with a new optimiser and without what a
    method adds to the task.

    Args:
        opened: the run.
        of: ``server``, or a type of clients.
        steps: optimiser steps; by default as many as the run's local training does.
        lr: constant learning rate; by default the clients' own, by their schedule.
        seed: of batches and dropout; by default the run's.

    Raises:
        ConfigError: the model has one modality, or the run's method does not say how long clients train.
        RunError: a model is missing or damaged.
    """
    plan = replace(_local_training(opened.experiment, steps), lr=lr, seed=seed)
    with cpu_threads(opened.experiment.run.threads):
        subject = opened.subject(of)
        _require_pair(subject)
        members = opened.comparable(subject)
        work, done, after = Work(opened, subject, plan), {}, {}
        before = _seen(opened, subject, members)
        for name, member in members.items():
            samples = opened.train(subject, member)
            with work.retrained(name, samples, member.settings.training) as done[name]:
                after[name] = _seen(opened, subject, members)
    return Distortion(opened.run.name, subject.name, subject.round, done, before, after)


def similarity(participant: Participant, samples: Samples) -> float:
    """Mean cosine of a sample's representations in two modalities: over samples, then over pairs of modalities."""
    found = [values.double() for values in participant.represent(samples).values()]
    means = [torch.linalg.vecdot(first, second).mean() for first, second in combinations(found, 2)]
    return float(torch.stack(means).mean())


def _seen(opened: Simulated, subject: Subject, members: Mapping[str, Member]) -> Seen:
    return Seen(opened.measured(subject, members, similarity), opened.figures(subject, members))


def _local_training(experiment: Experiment, steps: int | None) -> Plan:
    if steps is not None:
        return Plan(steps=steps)
    algorithm = experiment.algorithm
    epochs = getattr(algorithm, "local_epochs", None)
    if epochs is None:
        name = algorithm.component_name()
        raise ConfigError(f"algorithm '{name}' has no local_epochs to go by; say with --steps how long clients train")
    return Plan(steps=getattr(algorithm, "local_steps", None), epochs=int(epochs))


def _require_pair(subject: Subject) -> None:
    if len(subject.settings.encoders) < 2:
        (name,) = subject.settings.encoders
        raise ConfigError(
            f"'{subject.name}' encodes '{name}' only; distortion is of the similarity of two modalities: give a model "
            "that has them with --of"
        )
