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

log = logging.getLogger(__name__)

RECORD = "tuning.json"
_RATE, _PASSES = "server.training.optimizer.lr", "algorithm.server_epochs"
_LADDERS = {"rate": ([_RATE], ()), "passes": ([_PASSES], (1, 2, 4))}  # the method's own passes are the fewest


def tuned_twin(experiment: Experiment, out: Path, callbacks: Iterable[Callback] = ()) -> tuple[Experiment, Callback]:
    """A twin with the rate and passes that its validation prefers, and what writes them down in its run.

    Candidates are whole runs beside ``out``, of which only the best validation value over rounds is kept, never a test
    value. After an interruption the same call goes on behind the last candidate.

    Raises:
        PolyfedError: something does not fit, no candidate has a validation value, or ``out`` is not free.
    """
    twin = experiment.twin
    if twin is None or not twin.of:
        raise ConfigError("twin: a twin is made when an experiment is loaded; use Experiment.load")
    RunFolder.require_free(out)
    tunable = Tunable.of(experiment, _LADDERS)
    pattern = PatternSearch(tunable.kinds, twin.candidates, tunable.accepts)
    tried = Candidates(tunable, tuning_folder(out))
    with made_folder(tried.folder, tried.is_begun), RunFolder(tried.folder).lock(), heard_by(Callbacks(callbacks)):
        tried.restore()
        pattern.advance(tried.score)
    try:
        best = pattern.best
    except LookupError as error:
        raise RunError(f"twin of '{experiment.name}': {error}; look at its rate") from error
    if not pattern.is_surrounded:
        message = "%s: the best of %d candidates (%s) has neighbours that were not tried; give twin.candidates"
        log.warning(message, experiment.name, len(pattern.scores), choice_label(best))
    tried.save(best)
    return tried.experiment(best), _Moved(tried.folder, out)


def tuning_folder(out: Path) -> Path:
    """Where a twin is tuned that will run at ``out``."""
    return out.with_name(f"{out.name}.tuning")


@dataclass
class Candidates:
    """What was tried of a twin.

    Attributes:
        tunable: the twin as the method has it.
        folder: of the candidate that runs, and of what is known of earlier ones.
        known: each with ``rate``, ``passes``, and ``round`` and value of its best ``validation``, null where that never
            was finite.
    """

    tunable: Tunable
    folder: Path
    known: list[dict[str, Any]] = field(default_factory=list)

    def is_begun(self) -> bool:
        return any(entry.name != ".lock" for entry in self.folder.iterdir())

    def experiment(self, choice: Choice, **run: Any) -> Experiment:
        """The twin with the rate and passes of a choice, and other settings of ``run``."""
        content = self.tunable.at(choice).model_dump(mode="json")
        rate, passes = content["server"]["training"]["optimizer"]["lr"], content["algorithm"]["server_epochs"]
        chosen = f"rate {rate:g} and {passes} passes a round chosen on validation"
        given = {path: value for kind in self.tunable.kinds.values() for path, value in kind.values.items()}
        content |= {"description": f"{content['description']}; {chosen}", "run": content["run"] | run}
        return Experiment.parse({**content, "twin": {**content["twin"], "tuned": given}})

    def score(self, choice: Choice) -> float:
        """The best validation value of a candidate, which is run unless it is known; NaN if it has none."""
        found = next((each for each in self.known if choice.items() <= each.items()), None)
        if found is None:
            doing = f"tuning: candidate {len(self.known) + 1}, {choice_label(choice)}"
            preparing(doing)
            found = {**choice, **self._tried(choice)}
            preparing(doing)  # a log file is told of what took long, and not before it did
            self.known.append(found)
            self.save()
        return math.nan if found["validation"] is None else found["validation"]

    def _tried(self, choice: Choice) -> dict[str, Any]:
        server = self.tunable.experiment.server
        assert server is not None
        place = self.folder / "candidate"
        shutil.rmtree(place, ignore_errors=True)  # one that was killed
        try:
            records = begin_run(self.experiment(choice, output={}), place).records
            best = records.best(SERVER, server.task.primary, "validation")
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return dict(zip(("round", "validation"), best or (None, None), strict=True))

    def save(self, chosen: Choice | None = None) -> None:
        content = {"experiment": self._identity, "chosen": chosen, "candidates": self.known}
        write_atomically(self.folder / RECORD, (json.dumps(content, indent=1) + "\n").encode())

    def restore(self) -> None:
        """Take over what an interrupted search has found.

        Raises:
            RunError: it was of another experiment.
        """
        if (path := self.folder / RECORD).is_file():
            content = file_json(path.read_text())
            if content["experiment"] != self._identity:
                hint = "delete it, or choose another --out"
                raise RunError(f"'{self.folder}' has the tuning of an experiment with other settings; {hint}")
            self.known = content["candidates"]

    @property
    def _identity(self) -> str:
        return hashlib.sha256(self.tunable.experiment.to_yaml().encode()).hexdigest()


@dataclass(frozen=True)
class _Moved(Callback):
    """Moves the record of a search into the run as soon as that has begun."""

    folder: Path
    out: Path

    def handle(self, event: Event) -> None:
        """See ``Callback``."""
        if isinstance(event, RunStarted):
            shutil.copy(self.folder / RECORD, self.out / RECORD)
            shutil.rmtree(self.folder, ignore_errors=True)
