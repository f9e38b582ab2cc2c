"""Tuning of a twin whose server trains alone: rate and passes over P, chosen on validation.

The method's own rate and passes are tuned for the method, if at all: beside a twin that inherits them, a federation
gains what tuning alone would have gained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from polyfed.core.activity import heard_by, preparing
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.files import write_atomically
from polyfed.core.untrusted import file_json
from polyfed.runs.events import Callback, Callbacks, Event, RunStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder, made_folder
from polyfed.runs.records import SERVER
from polyfed.runs.session import begin_run
from polyfed.runs.twins import chosen_in_words

log = logging.getLogger(__name__)

RECORD = "tuning.json"
_BEYOND = 2  # steps that a grid may grow at an end
_LARGEST_RATE = 100.0  # that an optimiser accepts
_Point = tuple[float, int]


def tuned_twin(experiment: Experiment, out: Path, callbacks: Iterable[Callback] = ()) -> tuple[Experiment, Callback]:
    """A twin with the rate and passes that its validation prefers, and what writes them down in its run; one with a
    single rate and number of passes has these.

    Candidates are whole runs beside ``out``, of which only the best validation value over rounds is kept, never a test
    value. After an interruption the same call goes on behind the last candidate.

    Raises:
        PolyfedError: something does not fit, or ``out`` is not free.
    """
    RunFolder.require_free(out)
    grid = Grid.of(experiment)
    search = TwinSearch(experiment, grid, tuning_folder(out))
    if len(grid.first) == 1:  # chosen before, on another seed or elsewhere
        return search.candidate(grid.first[0]), Callback()
    with made_folder(search.folder, search.is_begun), RunFolder(search.folder).lock():
        search.restore()
        with heard_by(Callbacks(callbacks)):
            search.complete()
    chosen = search.best
    if grid.is_at_end(chosen):
        message = (
            "%s: the best candidate (rate x %g, passes x %d) is at the end of the grid; give twin.rates, twin.passes"
        )
        log.warning(message, experiment.name, *chosen)
    return search.candidate(chosen), _Record(search, out)


def tuning_folder(out: Path) -> Path:
    """Where a twin is tuned that will run at ``out``."""
    return out.with_name(f"{out.name}.tuning")


@dataclass(frozen=True)
class Grid:
    """Factors of the method's rate and passes: those given, and how they go on in equal ratios.

    Attributes:
        rates, passes: ascending, with those beyond the ends.
        first: the points that are always tried, the cheapest first.
    """

    rates: tuple[float, ...]
    passes: tuple[int, ...]
    first: tuple[_Point, ...]

    @classmethod
    def of(cls, experiment: Experiment) -> Grid:
        """That of a twin.

        Raises:
            ConfigError: it is no twin that can be tuned.
        """
        twin, server = experiment.twin, experiment.server
        if twin is None or server is None or not twin.of:
            raise ConfigError("twin: a twin is made when an experiment is loaded; use Experiment.load")
        rates, passes = sorted(set(twin.rates)), sorted(set(twin.passes))
        above = [rate for rate in _continued(rates) if rate * server.training.optimizer.lr <= _LARGEST_RATE]
        return cls(
            (*reversed(_continued(rates[::-1])), *rates, *above),
            (*passes, *map(round, _continued(passes))),
            tuple((rate, factor) for factor in passes for rate in rates),
        )

    def around(self, point: _Point) -> list[_Point]:
        row, column = self.rates.index(point[0]), self.passes.index(point[1])
        rates = self.rates[max(row - 1, 0) : row + 2]
        passes = self.passes[max(column - 1, 0) : column + 2]
        return [*((rate, point[1]) for rate in rates), *((point[0], factor) for factor in passes)]

    def is_at_end(self, point: _Point) -> bool:
        """Whether there may be better ones beyond; the method's own passes are the fewest, and no end."""
        return (len(self.rates) > 1 and point[0] in (self.rates[0], self.rates[-1])) or (
            len(self.passes) > 1 and point[1] == self.passes[-1]
        )


def with_beyond(values: list[float]) -> list[float]:
    ends = _continued(sorted(values)[::-1])[::-1], _continued(sorted(values))
    return [float(f"{value:.12g}") for value in (*ends[0], *sorted(values), *ends[1])]


def _continued(values: list[Any]) -> list[float]:
    """What follows on values in the ratio of the last two; nothing on a single one."""
    return [values[-1] * (values[-1] / values[-2]) ** step for step in range(1, _BEYOND + 1)] if len(values) > 1 else []


@dataclass
class TwinSearch:
    """The search over a grid.

    Attributes:
        experiment: the twin as the method has it.
        grid: of factors.
        folder: of the candidate that runs, and of what is known of earlier ones.
        scores: point -> round and value of its best validation, null where that never was finite.
    """

    experiment: Experiment
    grid: Grid
    folder: Path
    scores: dict[_Point, dict[str, Any]] = field(default_factory=dict)

    def is_begun(self) -> bool:
        return any(entry.name != ".lock" for entry in self.folder.iterdir())

    @property
    def best(self) -> _Point:
        known = {point: score["validation"] for point, score in self.scores.items()}
        return max(known, key=lambda point: -float("inf") if known[point] is None else known[point])

    def complete(self) -> None:
        for point in self._due():
            doing = f"tuning: candidate {len(self.scores) + 1}, rate x {point[0]:g}, passes x {point[1]}"
            preparing(doing)
            self.scores[point] = self._tried(point)
            preparing(doing)  # a log file is told of what took long, and not before it did
            write_atomically(self.folder / RECORD, self.to_json())

    def _due(self) -> Iterator[_Point]:
        while due := [point for point in self.grid.first if point not in self.scores]:
            yield due[0]
        while due := [point for point in self.grid.around(self.best) if point not in self.scores]:
            yield due[0]

    def _tried(self, point: _Point) -> dict[str, Any]:
        assert self.experiment.server is not None
        place = self.folder / "candidate"
        shutil.rmtree(place, ignore_errors=True)  # one that was killed
        try:
            records = begin_run(self.candidate(point, sinks=[]), place).records
            best = records.best(SERVER, self.experiment.server.task.primary, "validation")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return {"round": None, "validation": None} if best is None else {"round": best[0], "validation": best[1]}

    def candidate(self, point: _Point, **run: Any) -> Experiment:
        """The twin with the rate and passes of a point, and other settings of ``run``."""
        content = self.experiment.model_dump(mode="json")
        optimizer, algorithm = content["server"]["training"]["optimizer"], content["algorithm"]
        tuned = {"server.training.optimizer.lr": optimizer["lr"], "algorithm.server_epochs": algorithm["server_epochs"]}
        optimizer["lr"] = float(f"{optimizer['lr'] * point[0]:.12g}")  # 0.0002 x 3 without the last binary digit
        algorithm["server_epochs"] *= point[1]
        content["twin"]["tuned"] = tuned
        description = f"{content['description']}; {chosen_in_words(content)}"
        return Experiment.parse({**content, "description": description, "run": content["run"] | run})

    def restore(self) -> None:
        """Take over what an interrupted search has found.

        Raises:
            RunError: it was of another experiment.
        """
        if (path := self.folder / RECORD).is_file():
            known = file_json(path.read_text())
            if known["experiment"] != self._identity:
                hint = "delete it, or choose another --out"
                raise RunError(f"'{self.folder}' has the tuning of an experiment with other settings; {hint}")
            self.scores = {
                (row["rate"], row["passes"]): {key: row[key] for key in ("round", "validation")}
                for row in known["candidates"]
            }

    def to_json(self) -> bytes:
        rows = [{"rate": rate, "passes": passes, **score} for (rate, passes), score in self.scores.items()]
        chosen = dict(zip(("rate", "passes"), self.best, strict=True))
        facts = {"chosen": chosen, "at_end_of_grid": self.grid.is_at_end(self.best), "candidates": rows}
        return (json.dumps({"experiment": self._identity, **facts}, indent=1) + "\n").encode()

    @cached_property
    def _identity(self) -> str:
        return hashlib.sha256(self.experiment.to_yaml().encode()).hexdigest()


@dataclass(frozen=True)
class _Record(Callback):
    """Moves the record of a search into the run as soon as that has begun."""

    search: TwinSearch
    out: Path

    def handle(self, event: Event) -> None:
        """See ``Callback``."""
        if isinstance(event, RunStarted):
            write_atomically(self.out / RECORD, self.search.to_json())
            shutil.rmtree(self.search.folder, ignore_errors=True)
