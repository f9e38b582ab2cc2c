"""Every model of a run at every client: who is served how well, and who worst (FedAID, figure 5 and table 10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.drawing import heat_map
from polyfed.lab.analysis.judgements import (
    SHOWN_FIGURES,
    Figures,
    cells,
    client_table,
    heat_maps,
    mean_figures,
    names_of,
    with_mean,
)
from polyfed.lab.analysis.results import AnalysisResult, csv_text
from polyfed.lab.analysis.simulated import Simulated
from polyfed.reporting.figures import styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = ("model", "round", "kept", "client", "figure", "value")


class Judged(NamedTuple):
    """A model (server, type of clients, or the client that kept it) of a round at every client."""

    name: str
    round: int
    kept: bool
    figures: Figures

    def summary(self, name: str) -> dict[str, float]:
        *values, average = with_mean(self.figures, name)
        return {"average": average, "worst": min(values), "disparity": max(values) - min(values)}


Judges = Mapping[tuple[str, ...], Sequence[Judged]]
"""Clients -> the models that they can judge: those of their task, modalities and classes."""


def run_across(opened: Simulated) -> AnalysisResult:
    """Judge the global models and every kept model on every client's test samples.

    A kept model is judged as it is, by its task: without the server's features that some methods fuse in.

    Raises:
        ConfigError: no client can judge any model.
        RunError: a model is missing or damaged.
    """
    judged = _judged(opened)
    name, untrained = opened.run.name, opened.is_server_untrained
    content = [{"clients": clients, "models": list(map(_content, several))} for clients, several in judged.items()]
    return AnalysisResult(
        {"run": name, "server_untrained": untrained, "tables": content},
        [table for several in judged.values() for table in _tables(name, several, untrained)],
        partial(_draw, name, judged),
        csv_text([row for several in judged.values() for model in several for row in _rows(model)], _COLUMNS),
    )


def _judged(opened: Simulated) -> Judges:
    """With the mean of the kept models at each client, where there are several."""
    judged: dict[tuple[str, ...], list[Judged]] = {}
    with cpu_threads(opened.experiment.run.threads):
        for models, is_kept in ((opened.globals(), False), (map(opened.kept, opened.keepers), True)):
            for trained in models:
                if members := opened.judges(trained):
                    at_clients = Judged(trained.name, trained.round, is_kept, opened.figures(trained, members))
                    judged.setdefault(tuple(members), []).append(at_clients)
    if not judged:
        raise ConfigError(
            f"run '{opened.run.folder}' has no model, global or kept, that any client with test samples can judge"
        )
    return {clients: [*models, *_mean_of_kept(models)] for clients, models in judged.items()}


def _mean_of_kept(models: Sequence[Judged]) -> list[Judged]:
    kept = [model for model in models if model.kept]
    if len(kept) < 2:
        return []
    figures = mean_figures([model.figures for model in kept])
    return [Judged("mean of clients", max(model.round for model in kept), True, figures)]


def _rows(model: Judged) -> Iterator[Sequence[object]]:
    for client, at_client in model.figures.items():
        for name, value in at_client.items():
            yield *model[:3], client, name, value


def _content(model: Judged) -> dict[str, Any]:
    return model._asdict() | {"summary": {name: model.summary(name) for name in names_of(model.figures)}}


def _tables(run: str, models: Sequence[Judged], untrained: bool) -> list[TextTable]:
    first, notes = models[0].figures, list[str]()
    if untrained and SERVER in (model.name for model in models):
        notes = ["The server's model is as it was initialised: the method does not train it."]
    tables = []
    for name in names_of(first)[:SHOWN_FIGURES]:
        rows = [
            (model.name, *cells(model.figures, name), *map(figure, list(model.summary(name).values())[1:]))
            for model in models
        ]
        tables.append(client_table(run, name, first, rows, notes, "worst", "disparity"))
    return tables


@styled
def _draw(run: str, judged: Judges) -> Figure:
    """A row for each set of clients: every model at every client, a map a figure."""
    rows = [len(models) for models in judged.values()]
    drawing, grid = heat_maps(rows, SHOWN_FIGURES, max(map(len, judged)) + 1, f"{run}: models at clients")
    for line, (clients, models) in zip(grid, judged.items(), strict=True):
        names = names_of(models[0].figures)[:SHOWN_FIGURES]
        for axes, name in zip(line, names, strict=False):
            values = [with_mean(model.figures, name) for model in models]
            heat_map(axes, values, [model.name for model in models], [*clients, "average"], digits=1)
            axes.set_title(name)
        for axes in line[len(names) :]:  # a task with a single figure
            axes.set_axis_off()
    return drawing
