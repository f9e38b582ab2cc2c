"""How a round's local training distorts the alignment of modalities, client by client (FedAID, tables 6, 9 and 11)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from polyfed.analysis.drawing import DIVERGING, heat_map
from polyfed.analysis.retraining import SHOWN_FIGURES, Plan, Retrainer, figure_cells, gallery_notes, heat_maps
from polyfed.analysis.simulated import Figures, Simulated, TrainedModel, mean_of
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.federation.participant import Participant
from polyfed.reporting.figures import styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DISTORTION_HEADER = ("trained", "steps", "client", "figure", "before", "after", "change")


@dataclass(frozen=True)
class Alignment:
    """A model at every client.

    Attributes:
        similarity: client -> mean cosine of the representations of a sample in two modalities.
        figures: client -> recalls, or the task's metric.
    """

    similarity: Mapping[str, float]
    figures: Figures

    @classmethod
    def of(cls, opened: Simulated, trained: TrainedModel, members: Mapping[str, Member]) -> Alignment:
        """Of the model as it is."""
        return cls(opened.measured(trained, members, similarity), opened.figures(trained, members))

    def to_json(self) -> dict[str, Any]:
        """Both, with the means over clients."""
        return vars(self) | {"mean": {name: mean_of(self.figures, name) for name in self.names}}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the figures."""
        return tuple(next(iter(self.figures.values())))


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
    before: Alignment
    after: Mapping[str, Alignment]

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
        return fmean(alignment.figures[judged][figure] for alignment in self.after.values())

    def to_json(self) -> dict[str, Any]:
        """All figures; ``decrease`` by who trained, then by who judged."""
        return {
            "run": self.run,
            "of": self.of,
            "round": self.round,
            "steps": self.steps,
            "decrease": {a: {b: self.decrease(a, b) for b in self.clients} for a in self.clients},
            "mean_decrease": {client: self.mean_decrease(client) for client in self.clients},
            "before": self.before.to_json(),
            "after": {client: alignment.to_json() for client, alignment in self.after.items()},
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
    plan, algorithm = Plan(steps=steps, lr=lr, seed=seed), opened.experiment.algorithm
    if steps is None:
        epochs = getattr(algorithm, "local_epochs", None)
        if epochs is None:
            name = algorithm.component_name()
            raise ConfigError(
                f"algorithm '{name}' has no local_epochs to go by; say with --steps how long clients train"
            )
        plan = replace(plan, steps=getattr(algorithm, "local_steps", None), epochs=int(epochs))
    with cpu_threads(opened.experiment.run.threads):
        trained = opened.trained(of)
        if len(trained.settings.encoders) < 2:
            (modality,) = trained.settings.encoders
            raise ConfigError(
                f"'{trained.name}' encodes '{modality}' only; distortion is of the similarity of two modalities: give "
                "a model that has them with --of"
            )
        members = opened.require_judges(trained)
        retrainer, before = Retrainer(opened, trained, plan), Alignment.of(opened, trained, members)
        done: dict[str, int] = {}
        after: dict[str, Alignment] = {}
        for name, member in members.items():
            samples = opened.train(trained, member)
            with retrainer.retrained(name, samples, member.settings.training) as done[name]:
                after[name] = Alignment.of(opened, trained, members)
    return Distortion(opened.run.name, trained.name, trained.round, done, before, after)


def similarity(participant: Participant, samples: Samples) -> float:
    """Mean cosine of a sample's representations in two modalities: over samples, then over pairs of modalities."""
    values = [of_modality.double() for of_modality in participant.represent(samples).values()]
    means = [torch.linalg.vecdot(first, second).mean() for first, second in combinations(values, 2)]
    return float(torch.stack(means).mean())


def distortion_rows(distortion: Distortion) -> Iterator[Sequence[object]]:
    """For a CSV file: one row for each client that trained, client that judged, and figure; similarity is one."""
    for trained, alignment in distortion.after.items():
        for client in distortion.clients:
            before, after = (
                {"similarity": side.similarity[client], **side.figures[client]}
                for side in (distortion.before, alignment)
            )
            for name, value in after.items():
                change = value - before[name]
                yield trained, distortion.steps[trained], client, name, before[name], value, change


def distortion_tables(distortion: Distortion) -> list[TextTable]:
    """The decrease of similarity, then a table a figure."""
    clients, before = distortion.clients, distortion.before
    rows = [(f"on {a}", *(figure(distortion.decrease(a, b), 4) for b in clients)) for a in clients]
    rows.append(("average", *(figure(distortion.mean_decrease(client), 4) for client in clients)))
    note = (
        f"Mean cosine of paired representations of {distortion.of} (round {distortion.round}) before minus after local "
        "training; positive: distorted."
    )
    columns = ("re-trained", *(f"test on {client}" for client in clients))
    tables = [TextTable(f"{distortion.run}: distortion by local training", columns, rows, (note,))]
    for name in before.names[:SHOWN_FIGURES]:
        rows = [(f"{distortion.of}, round {distortion.round}", *figure_cells(before.figures, name))]
        rows += [(f"on {who}", *figure_cells(side.figures, name)) for who, side in distortion.after.items()]
        means = {client: {name: distortion.mean_figure(client, name)} for client in clients}
        rows.append(("average of re-trained", *figure_cells(means, name)))
        title, notes = f"{distortion.run}: {name} at each client", gallery_notes(before.figures, name)
        tables.append(TextTable(title, ("model", *clients, "average"), rows, notes))
    return tables


@styled
def draw_distortion(distortion: Distortion) -> Figure:
    """Left by how much the similarity of pairs fell, right how the first figure changed."""
    clients, before = distortion.clients, distortion.before
    name, rows = before.names[0], [*(f"on {client}" for client in clients), "average"]
    title = f"{distortion.run}: local training from {distortion.of}"
    drawing, ((left, right),) = heat_maps([len(rows)], 2, len(clients), title)
    decrease = [[distortion.decrease(a, b) for b in clients] for a in clients]
    mean = [distortion.mean_decrease(client) for client in clients]
    # orange is what is bad: a decrease here, and a fall of the figure on the right
    heat_map(left, [*decrease, mean], rows, clients, colours=f"{DIVERGING}_r", digits=3)
    left.set_title("decrease of the similarity of pairs")
    after = [[side.figures[client][name] for client in clients] for side in distortion.after.values()]
    after.append([distortion.mean_figure(client, name) for client in clients])
    changes = [[new - before.figures[b][name] for new, b in zip(line, clients, strict=True)] for line in after]
    heat_map(right, changes, rows, clients, colours=DIVERGING, digits=1)
    right.set_title(f"change of {name}")
    return drawing
