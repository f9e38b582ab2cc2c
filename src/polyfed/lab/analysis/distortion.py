"""How a round's local training distorts the alignment of modalities, client by client (FedAID, tables 6, 9 and 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import torch

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.federation.participant import Participant
from polyfed.lab.analysis.drawing import Matrix
from polyfed.lab.analysis.judgements import SHOWN_FIGURES, Figures, client_matrix, mean_figures, names_of, with_mean
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.retraining import EACH, Plan, Retrained, Retrainer
from polyfed.lab.analysis.simulated import Simulated
from polyfed.runs.records import SERVER

_SIMILARITY = "similarity"


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
    decrease = {
        row.on: {client: row.before[client][_SIMILARITY] - row.after[client][_SIMILARITY] for client in clients}
        for row in rows
    }
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
    return AnalysisResult.of_matrices(run, content, _matrices(run, rows, decrease, mean))


def _names(figures: Figures) -> list[str]:
    return [name for name in names_of(figures) if name != _SIMILARITY]


def _side(figures: Figures) -> dict[str, Any]:
    names = _names(figures)
    return {
        _SIMILARITY: {client: at[_SIMILARITY] for client, at in figures.items()},
        "figures": {client: {name: at[name] for name in names} for client, at in figures.items()},
        "mean": {name: with_mean(figures, name)[-1] for name in names},
    }


def _matrices(
    run: str, rows: Sequence[Retrained], decrease: Mapping[str, Mapping[str, float]], mean: Mapping[str, float]
) -> list[Matrix]:
    """The decrease of similarity, then a matrix a figure."""
    first, after = rows[0], mean_figures([row.after for row in rows])
    note = (
        f"Mean cosine of paired representations of {first.of} (round {first.round}) before minus after local "
        "training; positive: distorted."
    )
    names = [*(f"on {trained}" for trained in decrease), "average"]
    values = [list(of_client.values()) for of_client in (*decrease.values(), mean)]
    title, columns = f"{run}: distortion by local training", [f"test on {client}" for client in first.before]
    falls = Matrix(title, "re-trained", names, columns, values, digits=4, is_change=True, notes=(note,))
    sides = [(f"{first.of}, round {first.round}", first.before), *((f"on {row.on}", row.after) for row in rows)]
    sides.append(("average of re-trained", after))
    return [falls, *(client_matrix(run, name, sides) for name in _names(first.before)[:SHOWN_FIGURES])]
