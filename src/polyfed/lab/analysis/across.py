"""Every model of a run at every client: who is served how well, and who worst (FedAID, figure 5 and table 10)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.drawing import heat_map
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.retraining import SHOWN_FIGURES, gallery_notes, heat_maps
from polyfed.lab.analysis.simulated import Figures, Simulated, mean_figure
from polyfed.reporting.figures import styled
from polyfed.reporting.tables import TextTable, figure
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Judged:
    """A model at every client.

    Attributes:
        name: of the model: ``server``, a type of clients, or the client that kept it.
        round: after which its weights are.
        is_kept: whether a client kept it.
        figures: client -> figures on its test samples.
    """

    name: str
    round: int
    is_kept: bool
    figures: Figures

    def values(self, figure: str) -> list[float]:
        return [at[figure] for at in self.figures.values()]

    def summary(self, figure: str) -> dict[str, float]:
        values = self.values(figure)
        return {
            "average": mean_figure(self.figures, figure),
            "worst": min(values),
            "disparity": max(values) - min(values),
        }


@dataclass(frozen=True)
class JudgedModels:
    """Models that the same clients can judge.

    Attributes:
        clients: those, in client order.
        models: global ones, then kept ones, and the mean of the kept ones at each client where there are several.
    """

    clients: tuple[str, ...]
    models: tuple[Judged, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(next(iter(self.models[0].figures.values())))

    def to_json(self) -> dict[str, Any]:
        models = [
            {"name": model.name, "round": model.round, "kept": model.is_kept, "figures": model.figures}
            | {"summary": {name: model.summary(name) for name in self.names}}
            for model in self.models
        ]
        return {"clients": self.clients, "models": models}


@dataclass(frozen=True)
class Across(AnalysisResult):
    """Models of a run at its clients.

    Attributes:
        run: its name.
        groups: one for each task, modalities and classes among the clients.
        is_server_untrained: whether the server's model is as it was initialised.
    """

    csv_header = ("model", "round", "kept", "client", "figure", "value")

    run: str
    groups: tuple[JudgedModels, ...]
    is_server_untrained: bool

    def to_json(self) -> dict[str, Any]:
        tables = [group.to_json() for group in self.groups]
        return {"run": self.run, "server_untrained": self.is_server_untrained, "tables": tables}

    def csv_rows(self) -> Iterator[Sequence[object]]:
        """For a CSV file: one row for each model, client and figure."""
        for table in self.groups:
            for model in table.models:
                for client, at in model.figures.items():
                    for name, value in at.items():
                        yield model.name, model.round, model.is_kept, client, name, value

    def tables(self) -> list[TextTable]:
        """For each set of clients one table a figure."""
        tables = []
        for table in self.groups:
            untrained = self.is_server_untrained and SERVER in (model.name for model in table.models)
            notes = ("The server's model is as it was initialised: the method does not train it.",) if untrained else ()
            columns = ("model", *table.clients, "average", "worst", "disparity")
            for name in table.names[:SHOWN_FIGURES]:
                rows = [
                    (model.name, *map(figure, (*model.values(name), *model.summary(name).values())))
                    for model in table.models
                ]
                galleries = gallery_notes(table.models[0].figures, name)
                tables.append(TextTable(f"{self.run}: {name} at each client", columns, rows, (*notes, *galleries)))
        return tables

    @styled
    def draw(self) -> Figure:
        """A row for each set of clients: every model at every client, a map a figure."""
        widest = max(len(table.clients) for table in self.groups) + 1
        rows = [len(table.models) for table in self.groups]
        drawing, grid = heat_maps(rows, SHOWN_FIGURES, widest, f"{self.run}: models at clients")
        for line, table in zip(grid, self.groups, strict=True):
            names = table.names[:SHOWN_FIGURES]
            for axes, name in zip(line, names, strict=False):
                values = [[*model.values(name), mean_figure(model.figures, name)] for model in table.models]
                heat_map(axes, values, [model.name for model in table.models], [*table.clients, "average"], digits=1)
                axes.set_title(name)
            for axes in line[len(names) :]:  # a task with a single figure
                axes.set_axis_off()
        return drawing


def run_across(opened: Simulated) -> Across:
    """Judge the global models and every kept model on every client's test samples.

    A kept model is judged as it is, by its task: without the server's features that some methods fuse in.

    Raises:
        ConfigError: no client can judge any model.
        RunError: a model is missing or damaged.
    """
    judged: dict[tuple[str, ...], list[Judged]] = {}
    with cpu_threads(opened.experiment.run.threads):
        for models, is_kept in ((opened.globals(), False), (map(opened.kept, opened.keepers), True)):
            for trained in models:
                # models of other tasks, modalities or classes have judges, and so a table, of their own
                if members := opened.judges(trained):
                    figures = opened.figures(trained, members)
                    at_clients = Judged(trained.name, trained.round, is_kept, figures)
                    judged.setdefault(tuple(members), []).append(at_clients)
    if not judged:
        raise ConfigError(
            f"run '{opened.run.folder}' has no model, global or kept, that any client with test samples can judge"
        )
    groups = tuple(JudgedModels(clients, (*models, *_mean_of_kept(models))) for clients, models in judged.items())
    return Across(opened.run.name, groups, opened.is_server_untrained)


def _mean_of_kept(models: Sequence[Judged]) -> list[Judged]:
    kept = [model for model in models if model.is_kept]
    if len(kept) < 2:
        return []
    means = {
        client: {name: fmean(model.figures[client][name] for model in kept) for name in figures}
        for client, figures in kept[0].figures.items()
    }
    return [Judged("mean of clients", max(model.round for model in kept), True, means)]
