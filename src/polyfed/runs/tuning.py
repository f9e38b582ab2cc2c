"""Tuning: the grid that studies and twins search, and the search of a twin whose server trains alone.

Rate and passes over P of such a twin are chosen on validation.

The method's own rate and passes are tuned for the method, if at all: beside a twin that inherits them, a federation
gains what tuning alone would have gained.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
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
Choice = Mapping[str, Any]
"""Name of a setting -> value."""


def tuned_twin(experiment: Experiment, out: Path, callbacks: Iterable[Callback] = ()) -> tuple[Experiment, Callback]:
    """A twin with the rate and passes that its validation prefers, and what writes them down in its run; one with a
    single rate and number of passes has these.

    Candidates are whole runs beside ``out``, of which only the best validation value over rounds is kept, never a test
    value. After an interruption the same call goes on behind the last candidate.

    Raises:
        PolyfedError: something does not fit, or ``out`` is not free.
    """
    RunFolder.require_free(out)
    grid = Grid.of_twin(experiment)
    search = TwinSearch(experiment, grid, tuning_folder(out))
    if len(search.first) == 1:  # chosen before, on another seed or elsewhere
        return search.candidate(search.first[0]), Callback()
    with made_folder(search.folder, search.is_begun), RunFolder(search.folder).lock():
        search.restore()
        with heard_by(Callbacks(callbacks)):
            search.complete()
    chosen = search.best
    if grid.is_at_end(chosen):
        message = (
            "%s: the best candidate (rate x %g, passes x %d) is at the end of the grid; give twin.rates, twin.passes"
        )
        log.warning(message, experiment.name, chosen["rate"], chosen["passes"])
    return search.candidate(chosen), _Record(search, out)


def tuning_folder(out: Path) -> Path:
    """Where a twin is tuned that will run at ``out``."""
    return out.with_name(f"{out.name}.tuning")


@dataclass(frozen=True)
class Dimension:
    """Values of a setting to choose from.

    Attributes:
        first: those that are always tried.
        every: in order, with those that are tried once a neighbour is the best; empty where values have no order.
        ends: behind which there may be better ones.
    """

    first: Sequence[Any]
    every: Sequence[Any] = ()
    ends: Sequence[Any] = ()

    @classmethod
    def growing(cls, values: Sequence[float], most: float = math.inf) -> Dimension:
        """Ascending values that go on at both ends, up to ``most``."""
        above = [value for value in beyond(values) if value <= most]
        every = (*beyond(values[::-1])[::-1], *values, *above)
        return cls(values, every, (every[0], every[-1]) if len(values) > 1 else ())


def beyond(values: Sequence[float]) -> list[float]:
    """What follows on values in the ratio of the last two; nothing on a single one."""
    ratios = [(values[-1] / values[-2]) ** step for step in range(1, _BEYOND + 1)] if len(values) > 1 else []
    return [float(f"{values[-1] * ratio:.12g}") for ratio in ratios]


@dataclass(frozen=True)
class Grid:
    """Settings that are chosen together, by name; a choice has a value of each."""

    dimensions: Mapping[str, Dimension]

    @classmethod
    def of_twin(cls, experiment: Experiment) -> Grid:
        """Factors of the method's rate and passes.

        Raises:
            ConfigError: it is no twin that can be tuned.
        """
        twin, server = experiment.twin, experiment.server
        if twin is None or server is None or not twin.of:
            raise ConfigError("twin: a twin is made when an experiment is loaded; use Experiment.load")
        passes = sorted(set(twin.passes))
        more = (*passes, *map(round, beyond(passes)))
        ends = more[-1:] if len(passes) > 1 else ()  # the method's own passes are the fewest, and no end
        rates = Dimension.growing(sorted(set(twin.rates)), _LARGEST_RATE / server.training.optimizer.lr)
        return cls({"rate": rates, "passes": Dimension(passes, more, ends)})

    def first(self) -> list[Choice]:
        """Every combination that is always tried."""
        combinations = product(*(dimension.first for dimension in self.dimensions.values()))
        return [dict(zip(self.dimensions, values, strict=True)) for values in combinations]

    def around(self, choice: Choice) -> Iterator[Choice]:
        """A choice and its neighbours."""
        for name, dimension in self.dimensions.items():
            if dimension.every:
                place = dimension.every.index(choice[name])
                yield from ({**choice, name: value} for value in dimension.every[max(0, place - 1) : place + 2])

    def is_at_end(self, choice: Choice) -> bool:
        return any(choice[name] in dimension.ends for name, dimension in self.dimensions.items())


@dataclass
class TwinSearch:
    """The search over a twin's grid.

    Attributes:
        experiment: the twin as the method has it.
        grid: of factors.
        folder: of the candidate that runs, and of what is known of earlier ones.
        candidates: each with ``rate``, ``passes``, and ``round`` and value of its best ``validation``, null where that
            never was finite.
    """

    experiment: Experiment
    grid: Grid
    folder: Path
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def is_begun(self) -> bool:
        return any(entry.name != ".lock" for entry in self.folder.iterdir())

    @property
    def first(self) -> list[Choice]:
        """The choices that are always tried, the cheapest first."""
        return sorted(self.grid.first(), key=lambda choice: choice["passes"])

    @property
    def best(self) -> Choice:
        def validation(row: Mapping[str, Any]) -> float:
            return -math.inf if row["validation"] is None else row["validation"]

        return _choice_of(max(self.candidates, key=validation))

    def complete(self) -> None:
        for choice in self._due():
            doing = f"tuning: candidate {len(self.candidates) + 1}, rate x {choice['rate']:g}, passes x "
            preparing(f"{doing}{choice['passes']}")
            self.candidates.append({**choice, **self._tried(choice)})
            preparing(f"{doing}{choice['passes']}")  # a log file is told of what took long, and not before it did
            write_atomically(self.folder / RECORD, self.to_json())

    def _due(self) -> Iterator[Choice]:
        while due := self._untried(self.first) or self._untried(self.grid.around(self.best)):
            yield due[0]

    def _untried(self, choices: Iterable[Choice]) -> list[Choice]:
        tried = [_choice_of(row) for row in self.candidates]
        return [choice for choice in choices if choice not in tried]

    def _tried(self, choice: Choice) -> dict[str, Any]:
        assert self.experiment.server is not None
        place = self.folder / "candidate"
        shutil.rmtree(place, ignore_errors=True)  # one that was killed
        try:
            records = begin_run(self.candidate(choice, sinks=[]), place).records
            best = records.best(SERVER, self.experiment.server.task.primary, "validation")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return dict(zip(("round", "validation"), best or (None, None), strict=True))

    def candidate(self, choice: Choice, **run: Any) -> Experiment:
        """The twin with the rate and passes of a choice, and other settings of ``run``."""
        content = self.experiment.model_dump(mode="json")
        optimizer, algorithm = content["server"]["training"]["optimizer"], content["algorithm"]
        tuned = {"server.training.optimizer.lr": optimizer["lr"], "algorithm.server_epochs": algorithm["server_epochs"]}
        optimizer["lr"] = float(f"{optimizer['lr'] * choice['rate']:.12g}")  # 0.0002 x 3 without the last binary digit
        algorithm["server_epochs"] *= choice["passes"]
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
            self.candidates = known["candidates"]

    def to_json(self) -> bytes:
        facts = {"chosen": self.best, "at_end_of_grid": self.grid.is_at_end(self.best), "candidates": self.candidates}
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


def _choice_of(candidate: Mapping[str, Any]) -> Choice:
    return {name: candidate[name] for name in ("rate", "passes")}
