"""Every model of a run at every client: who is served how well, and who worst (FedAID, figure 5 and table 10)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyfed.analysis.retraining import Figures, mean_of
from polyfed.analysis.simulated import Simulated, Subject
from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError


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
        """One a client."""
        return [each[figure] for each in self.figures.values()]

    def summary(self, figure: str) -> dict[str, float]:
        """Unweighted mean over clients, the worst client's, and the disparity: greatest minus smallest."""
        values = self.values(figure)
        return {"average": mean_of(self.figures, figure), "worst": min(values), "disparity": max(values) - min(values)}


@dataclass(frozen=True)
class Table:
    """Models that the same clients can judge.

    Attributes:
        clients: those, in client order.
        models: global ones first.
    """

    clients: tuple[str, ...]
    models: tuple[Judged, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the figures."""
        return tuple(next(iter(self.models[0].figures.values())))

    @property
    def local(self) -> Judged | None:
        """Mean of the kept models at each client; None if there are not several."""
        kept = [model.figures for model in self.models if model.is_kept]
        if len(kept) < 2:
            return None
        found = {
            client: {name: mean_of({str(k): each[client] for k, each in enumerate(kept)}, name) for name in self.names}
            for client in self.clients
        }
        return Judged("mean of clients", max(model.round for model in self.models if model.is_kept), True, found)

    @property
    def rows(self) -> tuple[Judged, ...]:
        """The models, then the mean of the kept ones."""
        return self.models if self.local is None else (*self.models, self.local)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "clients": list(self.clients),
            "models": [
                {"name": model.name, "round": model.round, "kept": model.is_kept, "figures": dict(model.figures)}
                | {"summary": {name: model.summary(name) for name in self.names}}
                for model in self.rows
            ],
        }


@dataclass(frozen=True)
class Across:
    """Models of a run at its clients.

    Attributes:
        run: its name.
        tables: one for each task, modalities and classes among the clients.
        is_server_untrained: whether the server's model is as it was initialised.
    """

    run: str
    tables: tuple[Table, ...]
    is_server_untrained: bool

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        tables = [table.to_json() for table in self.tables]
        return {"run": self.run, "server_untrained": self.is_server_untrained, "tables": tables}


def run_across(opened: Simulated) -> Across:
    """Judge the global models and every kept model on every client's test samples.

    A kept model is judged as it is, by its task: without the server's features that some methods fuse in.

    Raises:
        ConfigError: no client can judge any model.
        RunError: a model is missing or damaged.
    """
    found: dict[tuple[str, ...], list[Judged]] = {}
    with cpu_threads(opened.experiment.run.threads):
        for subject, is_kept in _subjects(opened):
            members = opened.suited(subject)
            if not members:
                continue
            judged = Judged(subject.name, subject.round, is_kept, opened.figures(subject, members))
            found.setdefault(tuple(members), []).append(judged)
    if not found:
        raise ConfigError(
            f"run '{opened.run.folder}' has no model, global or kept, that any client with test samples can judge"
        )
    tables = tuple(Table(clients, tuple(models)) for clients, models in found.items())
    return Across(opened.run.name, tables, opened.is_server_untrained)


def _subjects(opened: Simulated) -> Iterator[tuple[Subject, bool]]:
    for subject in opened.globals():
        yield subject, False
    for client in opened.keepers:
        yield opened.kept(client), True
