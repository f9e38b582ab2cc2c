"""Figures of models at clients: how the analyses of simulated runs read and show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from polyfed.lab.analysis.drawing import Matrix
from polyfed.reporting.metrics import find_recalls
from polyfed.reporting.tables import count

Figures = Mapping[str, Mapping[str, float]]
"""Client -> figure (``R@1``) -> value."""

SHOWN_FIGURES = 2
"""Figures that tables and plots show, such as R@1 and R@5; the files have all."""


def figures_of(metrics: Mapping[str, float], primary: str) -> dict[str, float]:
    """``R@K``, mean over directions, for each protocol and K, then galleries; without recalls the main metric.

    Protocols are told apart as in the metrics: ``R@1``, ``R@1_full``, ``R@1_batch64``; ``gallery`` likewise.
    """
    recalls: dict[str, list[float]] = {}
    galleries: dict[str, list[float]] = {}
    for recall in sorted(find_recalls(metrics), key=lambda recall: (recall.protocol, recall.cutoff)):
        suffix = f"_{recall.protocol}" if recall.protocol else ""
        recalls.setdefault(f"R@{recall.cutoff}{suffix}", []).append(recall.value)
        if not math.isnan(recall.gallery):
            galleries.setdefault(f"gallery{suffix}", []).append(recall.gallery)
    means = {name: fmean(values) for name, values in (recalls | galleries).items()}
    return means or {primary: metrics[primary]}


def names_of(figures: Figures) -> list[str]:
    return list(next(iter(figures.values())))


def with_mean(figures: Figures, name: str) -> list[float]:
    """One figure at every client, and their mean."""
    values = [at_client[name] for at_client in figures.values()]
    return [*values, fmean(values)]


def mean_figures(several: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """The mean over several models, client by client."""
    return {
        client: {name: fmean(figures[client][name] for figures in several) for name in at_client}
        for client, at_client in several[0].items()
    }


def client_matrix(run: str, name: str, models: Sequence[tuple[str, Figures]], notes: Sequence[str] = ()) -> Matrix:
    """One figure of each model (a row) at each client; under it how large the galleries are that a recall is of."""
    first = models[0][1]
    key = f"gallery{''.join(name.partition('_')[1:])}"
    sizes = ", ".join(f"{client} {count(at[key])}" for client, at in first.items() if key in at)
    galleries = [f"Gallery, mean over directions: {sizes}."] if sizes and name.startswith("R@") else []
    values = [with_mean(figures, name) for _, figures in models]
    names, columns = [model for model, _ in models], [*first, "average"]
    return Matrix(f"{run}: {name} at each client", "model", names, columns, values, notes=(*notes, *galleries))
