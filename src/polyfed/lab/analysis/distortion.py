"""How a round's local training distorts the alignment of modalities, client by client (FedAID, tables 6, 9 and 11)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.participant import Participant
from polyfed.lab.analysis.drawing import DIVERGING, heat_map
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.retraining import (
    EACH,
    SHOWN_FIGURES,
    Plan,
    Retrained,
    Retrainer,
    figure_cells,
    gallery_notes,
    heat_maps,
)
from polyfed.lab.analysis.simulated import Figures, Simulated, mean_figure
from polyfed.reporting.figures import styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIMILARITY = "similarity"


@dataclass(frozen=True)
class Distortion(AnalysisResult):
    """What local training does to a global model.

    Attributes:
        run: name of the run.
        rows: one for each client that trained; figures are the mean cosine of the representations of a sample in two
            modalities, ``similarity``, then recalls, or the task's metric.
    """

    csv_header = ("trained", "steps", "client", "figure", "before", "after", "change")

    run: str
    rows: tuple[Retrained, ...]

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(row.on for row in self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in next(iter(self.rows[0].before.values())) if name != _SIMILARITY)

    def decrease(self, trained: str, judged: str) -> float:
        """By how much the similarity at ``judged`` falls when ``trained`` trains; positive is distortion."""
        row = self.rows[self.clients.index(trained)]
        return row.before[judged][_SIMILARITY] - row.after[judged][_SIMILARITY]

    def mean_decrease(self, judged: str) -> float:
        return fmean(self.decrease(trained, judged) for trained in self.clients)

    def mean_figure(self, judged: str, figure: str) -> float:
        return fmean(row.after[judged][figure] for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """All figures; ``decrease`` by who trained, then by who judged."""

        def side(figures: Figures) -> dict[str, Any]:
            return {
                _SIMILARITY: {client: at[_SIMILARITY] for client, at in figures.items()},
                "figures": {client: {name: at[name] for name in self.names} for client, at in figures.items()},
                "mean": {name: mean_figure(figures, name) for name in self.names},
            }

        first = self.rows[0]
        return {
            "run": self.run,
            "of": first.of,
            "round": first.round,
            "steps": {row.on: row.steps for row in self.rows},
            "decrease": {a: {b: self.decrease(a, b) for b in self.clients} for a in self.clients},
            "mean_decrease": {client: self.mean_decrease(client) for client in self.clients},
            "overall_decrease": fmean(map(self.mean_decrease, self.clients)),
            "before": side(first.before),
            "after": {row.on: side(row.after) for row in self.rows},
        }

    def csv_rows(self) -> Iterator[Sequence[object]]:
        """For a CSV file: one row for each client that trained, client that judged, and figure; similarity is one."""
        for row in self.rows:
            for judgement in row.judgements():
                yield row.on, row.steps, *judgement

    def tables(self) -> list[TextTable]:
        """The decrease of similarity, then a table a figure."""
        clients, first = self.clients, self.rows[0]
        rows = [(f"on {a}", *(figure(self.decrease(a, b), 4) for b in clients)) for a in clients]
        rows.append(("average", *(figure(self.mean_decrease(client), 4) for client in clients)))
        note = (
            f"Mean cosine of paired representations of {first.of} (round {first.round}) before minus after local "
            "training; positive: distorted."
        )
        columns = ("re-trained", *(f"test on {client}" for client in clients))
        tables = [TextTable(f"{self.run}: distortion by local training", columns, rows, (note,))]
        for name in self.names[:SHOWN_FIGURES]:
            rows = [(f"{first.of}, round {first.round}", *figure_cells(first.before, name))]
            rows += [(f"on {row.on}", *figure_cells(row.after, name)) for row in self.rows]
            means = {client: {name: self.mean_figure(client, name)} for client in clients}
            rows.append(("average of re-trained", *figure_cells(means, name)))
            title, notes = f"{self.run}: {name} at each client", gallery_notes(first.before, name)
            tables.append(TextTable(title, ("model", *clients, "average"), rows, notes))
        return tables

    @styled
    def draw(self) -> Figure:
        """Left by how much the similarity of pairs fell, right how the first figure changed."""
        clients, name = self.clients, self.names[0]
        names, title = [*(f"on {c}" for c in clients), "average"], f"{self.run}: local training from "
        drawing, ((left, right),) = heat_maps([len(names)], 2, len(clients), title + self.rows[0].of)
        decrease = [[self.decrease(a, b) for b in clients] for a in clients]
        mean = [self.mean_decrease(client) for client in clients]
        # orange is what is bad: a decrease here, and a fall of the figure on the right
        heat_map(left, [*decrease, mean], names, clients, colours=f"{DIVERGING}_r", digits=3)
        left.set_title("decrease of the similarity of pairs")
        changes = [[row.change(client, name) for client in clients] for row in self.rows]
        mean = [fmean(of_client) for of_client in zip(*changes, strict=True)]
        heat_map(right, [*changes, mean], names, clients, colours=DIVERGING, digits=1)
        right.set_title(f"change of {name}")
        return drawing


def run_distortion(
    opened: Simulated, of: str = SERVER, *, steps: int | None = None, lr: float | None = None, seed: int | None = None
) -> Distortion:
    """Let every client train a model on its task alone, and compare what becomes of it at every client.

    Similarity is the mean over a client's test samples, and over pairs of modalities, of the cosine between the two
    representations. Training is that of the round after the model's last, with a new optimiser and without what a
    method adds to the task.

    Raises:
        ConfigError: the model has one modality, or the run's method does not say how long clients train.
        RunError: a model is missing or damaged.
    """
    plan, algorithm = Plan(steps=steps, lr=lr, seed=seed), opened.experiment.algorithm
    if steps is None:
        training = algorithm.local_training
        if training is None:
            name = algorithm.component_name()
            raise ConfigError(f"algorithm '{name}' does not say how long clients train; say it with --steps")
        # a method that counts a round in steps does as many, in however many passes
        plan = replace(plan, steps=training.steps, epochs=training.epochs)
    with cpu_threads(opened.experiment.run.threads):
        trained = opened.trained(of)
        if len(trained.settings.encoders) < 2:
            (modality,) = trained.settings.encoders
            raise ConfigError(
                f"'{trained.name}' encodes '{modality}' only; distortion is of the similarity of two modalities: give "
                "a model that has them with --of"
            )
        members = opened.require_judges(trained)

        def figures() -> Figures:
            similarities, recalls = opened.measured(trained, members, similarity), opened.figures(trained, members)
            return {client: {_SIMILARITY: similarities[client], **recalls[client]} for client in members}

        rows = tuple(Retrainer(opened, trained, plan).rows(members, EACH, figures))
    return Distortion(opened.run.name, rows)


def similarity(participant: Participant, samples: Samples) -> float:
    """Mean cosine of a sample's representations in two modalities: over samples, then over pairs of modalities."""
    values = [of_modality.double() for of_modality in participant.represent(samples).values()]
    # of unit vectors, so that products are cosines
    means = [torch.linalg.vecdot(first, second).mean() for first, second in combinations(values, 2)]
    return float(torch.stack(means).mean())
