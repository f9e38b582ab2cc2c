"""What re-training some layers of a trained model on private data does to it everywhere (FedAID, Appendix A)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from polyfed.core.device import cpu_threads
from polyfed.core.errors import ConfigError, DataError, nearest
from polyfed.core.randomness import isolated
from polyfed.data.samples import Samples
from polyfed.data.union import union
from polyfed.federation.membership import Member
from polyfed.federation.settings import TrainingSettings
from polyfed.lab.analysis.depth import chosen_tensors
from polyfed.lab.analysis.drawing import DIVERGING, heat_map
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.lab.analysis.simulated import Figures, Simulated, TrainedModel, mean_figure, training_alone
from polyfed.optim.settings import Schedule
from polyfed.reporting.figures import empty_figure, styled
from polyfed.reporting.tables import TextTable, count, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

EACH, UNION = "each", "union"
SHOWN_FIGURES = 2
"""Figures that tables and plots show, such as R@1 and R@5; the files have all."""


@dataclass(frozen=True)
class Plan:
    """How a model is re-trained.

    Attributes:
        layers: ``all``, ``shallow`` or ``deep``.
        depth: number of shallow layers, for all modalities or by modality; None: half of each encoder's.
        steps: optimiser steps; None with ``epochs``.
        epochs: passes over the samples, unless ``steps`` says how many batches.
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
    """One model before and after it was re-trained.

    Attributes:
        of: name of the model.
        round: after which its weights were.
        on: the client whose data it saw, or ``union``.
        steps: optimiser steps that were done.
        before, after: figures at every client.
    """

    of: str
    round: int
    on: str
    steps: int
    before: Figures
    after: Figures

    def change(self, client: str, figure: str) -> float:
        return self.after[client][figure] - self.before[client][figure]

    def judgements(self) -> Iterator[tuple[str, str, float, float, float]]:
        for client, figures in self.before.items():
            for name, value in figures.items():
                yield client, name, value, self.after[client][name], self.change(client, name)


@dataclass(frozen=True)
class Retraining(AnalysisResult):
    """What re-training did in a run.

    Attributes:
        run: its name.
        plan: how.
        trained: number of parameters that were trained.
        clients: who judged, in client order.
        rows: one for each model and each set of samples.
    """

    csv_header = ("of", "round", "layers", "on", "steps", "client", "figure", "before", "after", "change")

    run: str
    plan: Plan
    trained: int
    clients: tuple[str, ...]
    rows: tuple[Retrained, ...]

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(self.rows[0].before[self.clients[0]])

    def to_json(self) -> dict[str, Any]:
        plan = {name: getattr(self.plan, name) for name in ("layers", "depth", "steps", "lr", "seed")}
        rows = []
        for row in self.rows:
            sides = {"before": row.before, "after": row.after}
            means = {side: {name: mean_figure(at, name) for name in self.figures} for side, at in sides.items()}
            rows.append(vars(row) | {"mean": means})
        return {"run": self.run, **plan, "parameters": self.trained, "rows": rows}

    def csv_rows(self) -> Iterator[Sequence[object]]:
        for row in self.rows:
            for judgement in row.judgements():
                yield row.of, row.round, self.plan.layers, row.on, row.steps, *judgement

    def tables(self) -> list[TextTable]:
        """One table a figure: each model before, then after it was re-trained on each set."""
        parameters, layers = count(self.trained), self.plan.layers
        note = f"In brackets: change by re-training {parameters} parameters ({layers} layers)."
        tables = []
        for name in self.figures[:SHOWN_FIGURES]:
            lines: list[Sequence[str]] = []
            # each model has a line of its own, then one for each set that it was re-trained on
            for of, rows in groupby(self.rows, key=lambda row: (row.of, row.round, row.before)):
                lines.append((f"{of[0]}, round {of[1]}", *figure_cells(of[2], name)))
                for row in rows:
                    changes = _changes(row, name)
                    cells = zip(figure_cells(row.after, name), changes, strict=True)
                    title = f"{row.of}, on {row.on}, {row.steps} steps"
                    lines.append((title, *(f"{after} ({change:+z.2f})" for after, change in cells)))
            columns = ("model", *self.clients, "average")
            notes = (note, *gallery_notes(self.rows[0].before, name))
            tables.append(TextTable(f"{self.run}: {name} at each client", columns, lines, notes))
        return tables

    @styled
    def draw(self) -> Figure:
        """Change of each figure by model and samples, at each client and on average."""
        names, rows = self.figures[:SHOWN_FIGURES], [f"{row.of}, on {row.on}" for row in self.rows]
        columns, title = [*self.clients, "average"], f"{self.run}: {self.plan.layers} layers re-trained"
        drawing, (panels,) = heat_maps([len(rows)], len(names), len(columns), title)
        for axes, name in zip(panels, names, strict=True):
            changes = [_changes(row, name) for row in self.rows]
            heat_map(axes, changes, rows, columns, colours=DIVERGING, digits=1)
            axes.set_title(f"change of {name}")
        return drawing


class Retrainer:
    """Trains one model again and again, each time from where it was.

    Args:
        opened: the run.
        trained: the model.
        plan: which layers, and how long.

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


def run_retraining(opened: Simulated, of: str, on: str, plan: Plan | None = None) -> Retraining:
    """Re-train a part of a model with the clients' own task, the rest frozen, and judge it at every client.

    Batches are drawn, and learning rates are, as in the round after the model's last. The optimiser is new.

    Raises:
        ConfigError: no such model, client or layers, or there is nothing to train.
        RunError: a model is missing or damaged.
    """
    plan = plan or Plan()
    rows: list[Retrained] = []
    with cpu_threads(opened.experiment.run.threads):  # as in the run, whose sums depend on their number
        members = _judges(opened, of, on)
        for trained in _models(opened, of):
            retrainer = Retrainer(opened, trained, plan)
            rows += retrainer.rows(members, on)
    return Retraining(opened.run.name, plan, retrainer.parameters, tuple(members), tuple(rows))


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


# ---- what is shown, also of distortion and of models across clients


def figure_cells(figures: Figures, name: str) -> tuple[str, ...]:
    return (*(figure(at[name]) for at in figures.values()), figure(mean_figure(figures, name)))


def gallery_notes(figures: Figures, name: str) -> tuple[str, ...]:
    """How large the galleries are that a recall is of, client by client; nothing for other figures."""
    key = f"gallery{''.join(name.partition('_')[1:])}"
    sizes = ", ".join(f"{client} {count(at[key])}" for client, at in figures.items() if key in at)
    return (f"Gallery, mean over directions: {sizes}.",) if sizes and name.startswith("R@") else ()


def heat_maps(rows: Sequence[int], panels: int, columns: int, title: str) -> tuple[Figure, list[list[Axes]]]:
    """A figure with panels for heat maps side by side, lines of which have so many rows each."""
    width, height = 2.8 + max(2.4, 0.55 * min(columns, 30)), 1.6 + max(1.6, 0.35 * min(max(rows), 60))
    drawing = empty_figure(width * panels, height * len(rows), title)
    return drawing, [list(line) for line in drawing.subplots(len(rows), panels, squeeze=False)]


def _changes(row: Retrained, name: str) -> list[float]:
    return [
        *(row.change(client, name) for client in row.after),
        mean_figure(row.after, name) - mean_figure(row.before, name),
    ]
