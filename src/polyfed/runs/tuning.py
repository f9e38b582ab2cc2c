"""The search of a twin whose server trains alone: its rate and passes over P are chosen on validation.

The method's own rate and passes are tuned for the method, if at all: beside a twin that inherits them, a federation
gains what tuning alone would have gained. Studies tune a twin as they tune all rows, by the same pattern search.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
from collections.abc import Iterable
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
from polyfed.runs.pattern_search import Choice, PatternSearch, choice_label
from polyfed.runs.records import SERVER
from polyfed.runs.session import begin_run
from polyfed.runs.tunable import Tunable
from polyfed.runs.twins import PASSES, RATE, chosen_in_words

log = logging.getLogger(__name__)

RECORD = "tuning.json"
_LADDERS = {"rate": ([RATE], ()), "passes": ([PASSES], (1, 2, 4))}  # the method's own passes are the fewest


def tuned_twin(experiment: Experiment, out: Path, callbacks: Iterable[Callback] = ()) -> tuple[Experiment, Callback]:
    """A twin with the rate and passes that its validation prefers, and what writes them down in its run.

    Candidates are whole runs beside ``out``, of which only the best validation value over rounds is kept, never a test
    value. After an interruption the same call goes on behind the last candidate.

    Raises:
        PolyfedError: something does not fit, no candidate has a validation value, or ``out`` is not free.
    """
    RunFolder.require_free(out)
    search = TwinSearch(experiment, tuning_folder(out))
    with made_folder(search.folder, search.is_begun), RunFolder(search.folder).lock():
        search.restore()
        with heard_by(Callbacks(callbacks)):
            search.complete()
    if not search.pattern.is_surrounded:
        message = "%s: the best of %d candidates (%s) has neighbours that were not tried; give twin.candidates"
        log.warning(message, experiment.name, len(search.pattern.scores), choice_label(search.best))
    return search.candidate(search.best), _Record(search, out)


def tuning_folder(out: Path) -> Path:
    """Where a twin is tuned that will run at ``out``."""
    return out.with_name(f"{out.name}.tuning")


@dataclass
class TwinSearch:
    """The search for a twin's rate and passes.

    Attributes:
        experiment: the twin as the method has it.
        folder: of the candidate that runs, and of what is known of earlier ones.
        candidates: each with ``rate``, ``passes``, and ``round`` and value of its best ``validation``, null where that
            never was finite.
    """

    experiment: Experiment
    folder: Path
    candidates: list[dict[str, Any]] = field(default_factory=list)

    def is_begun(self) -> bool:
        return any(entry.name != ".lock" for entry in self.folder.iterdir())

    @cached_property
    def _tunable(self) -> Tunable:
        if self.experiment.twin is None or self.experiment.server is None or not self.experiment.twin.of:
            raise ConfigError("twin: a twin is made when an experiment is loaded; use Experiment.load")
        return Tunable.of(self.experiment, _LADDERS)

    @cached_property
    def pattern(self) -> PatternSearch:
        tunable, twin = self._tunable, self.experiment.twin
        return PatternSearch(tunable.kinds, twin.candidates if twin else 0, tunable.accepts)

    @property
    def best(self) -> Choice:
        """The candidate with the highest validation value; raises RunError if none has one."""
        try:
            return self.pattern.best
        except LookupError as error:
            raise RunError(f"twin of '{self.experiment.name}': {error}; look at its rate") from error

    def complete(self) -> None:
        """Run what is not known yet."""
        while due := self.pattern.due():
            for choice in due:
                self.pattern.tell(choice, self._score(choice))

    def _score(self, choice: Choice) -> float:
        number = len(self.pattern.scores)
        if number == len(self.candidates):
            doing = f"tuning: candidate {number + 1}, {choice_label(choice)}"
            preparing(doing)
            self.candidates.append({**choice, **self._tried(choice)})
            preparing(doing)  # a log file is told of what took long, and not before it did
            write_atomically(self.folder / RECORD, self.to_json())
        validation = self.candidates[number]["validation"]
        return math.nan if validation is None else validation

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
        content = self._tunable.at(choice).model_dump(mode="json")
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
        known = [(choice, score) for choice, score in self.pattern.scores if not math.isnan(score)]
        facts = {"chosen": dict(self.pattern.best) if known else None, "candidates": self.candidates}
        content = {"experiment": self._identity, **facts}
        return (json.dumps(content, indent=1) + "\n").encode()

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
