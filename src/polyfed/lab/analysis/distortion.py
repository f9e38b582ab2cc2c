"""How a round's local training distorts the alignment of modalities, client by client (FedAID, tables 6, 9 and 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.participant import Participant
from polyfed.lab.analysis.drawing import DIVERGING, heat_map
from polyfed.lab.analysis.judgements import (
    SHOWN_FIGURES,
    Figures,
    cells,
    client_table,
    heat_maps,
    map_of_changes,
    mean_figures,
    names_of,
    with_mean,
)
from polyfed.lab.analysis.results import AnalysisResult, csv_text
from polyfed.lab.analysis.retraining import EACH, Plan, Retrained, Retrainer
from polyfed.lab.analysis.simulated import Simulated
from polyfed.reporting.figures import styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIMILARITY = "similarity"
_COLUMNS = ("trained", "steps", "client", "figure", "before", "after", "change")


def run_distortion(
    opened: Simulated, of: str = SERVER, *, steps: int | None = None, lr: float | None = None, seed: int | None = None
) -> AnalysisResult:
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

        rows = list(Retrainer(opened, trained, plan).rows(members, EACH, figures))
    return distortion_result(opened.run.name, rows)


def similarity(participant: Participant, samples: Samples) -> float:
    """Mean cosine of a sample's representations in two modalities: over samples, then over pairs of modalities."""
    values = [of_modality.double() for of_modality in participant.represent(samples).values()]
    # of unit vectors, so that products are cosines
    means = [torch.linalg.vecdot(first, second).mean() for first, second in combinations(values, 2)]
    return float(torch.stack(means).mean())


def distortion_result(run: str, rows: Sequence[Retrained]) -> AnalysisResult:
    """``rows``: one for each client that trained; ``decrease`` is by who trained, then by who judged."""
    clients, first = [row.on for row in rows], rows[0]
    decrease = {row.on: dict(zip(clients, (-z for z in row.changes(_SIMILARITY)), strict=False)) for row in rows}
    mean = {judged: fmean(of_client[judged] for of_client in decrease.values()) for judged in clients}
    content = {
        "run": run,
        "of": first.of,
        "round": first.round,
        "steps": dict(zip(clients, (row.steps for row in rows), strict=True)),
        "decrease": decrease,
        "mean_decrease": mean,
        "overall_decrease": fmean(mean.values()),
        "before": _side(first.before),
        "after": dict(zip(clients, (_side(row.after) for row in rows), strict=True)),
    }
    decreases = {
        **{f"on {trained}": list(by.values()) for trained, by in decrease.items()},
        "average": list(mean.values()),
    }
    picture = partial(_draw, run, rows, decreases)
    return AnalysisResult(content, _tables(run, rows, decreases), picture, _csv(rows))


def _csv(rows: Sequence[Retrained]) -> str:
    lines = [(row.on, row.steps, *judgement) for row in rows for judgement in row.judgements()]
    return csv_text(lines, _COLUMNS)


def _names(figures: Figures) -> list[str]:
    return [name for name in names_of(figures) if name != _SIMILARITY]


def _side(figures: Figures) -> dict[str, Any]:
    names = _names(figures)
    return {
        _SIMILARITY: {client: at[_SIMILARITY] for client, at in figures.items()},
        "figures": {client: {name: at[name] for name in names} for client, at in figures.items()},
        "mean": {name: with_mean(figures, name)[-1] for name in names},
    }


def _tables(run: str, rows: Sequence[Retrained], decreases: dict[str, list[float]]) -> list[TextTable]:
    """The decrease of similarity, then a table a figure."""
    first, after = rows[0], mean_figures([row.after for row in rows])
    note = (
        f"Mean cosine of paired representations of {first.of} (round {first.round}) before minus after local "
        "training; positive: distorted."
    )
    lines = [(name, *(figure(value, 4) for value in values)) for name, values in decreases.items()]
    columns = ("re-trained", *(f"test on {client}" for client in first.before))
    tables = [TextTable(f"{run}: distortion by local training", columns, lines, (note,))]
    for name in _names(first.before)[:SHOWN_FIGURES]:
        sides = [(f"{first.of}, round {first.round}", first.before), *((f"on {row.on}", row.after) for row in rows)]
        lines = [(side, *cells(figures, name)) for side, figures in [*sides, ("average of re-trained", after)]]
        tables.append(client_table(run, name, first.before, lines, ()))
    return tables


@styled
def _draw(run: str, rows: Sequence[Retrained], decreases: dict[str, list[float]]) -> Figure:
    """Left by how much the similarity of pairs fell, right how the first figure changed."""
    clients, name = list(rows[0].before), _names(rows[0].before)[0]
    title = f"{run}: local training from {rows[0].of}"
    drawing, ((left, right),) = heat_maps([len(decreases)], 2, len(clients), title)
    # orange is what is bad: a decrease here, and a fall of the figure on the right
    heat_map(left, list(decreases.values()), list(decreases), clients, colours=f"{DIVERGING}_r", digits=3)
    left.set_title("decrease of the similarity of pairs")
    changes = [row.changes(name)[:-1] for row in rows]
    mean = [fmean(of_client) for of_client in zip(*changes, strict=True)]
    map_of_changes(right, [*changes, mean], list(decreases), clients)
    right.set_title(f"change of {name}")
    return drawing
