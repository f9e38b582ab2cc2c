"""Trackers outside polyfed as a callback of the run."""

from __future__ import annotations

from polyfed.runs.events import Callback, Event, Recorder, RoundComplete, RunStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.sink import SinkRun, SinkSet, round_records


class Trackers(Callback):
    """Gives each complete round to the sinks of an experiment.

    Args:
        experiment: names the sinks.
        folder: of the run.
        identity: of the run.

    Attributes:
        sinks: as a context, closes them.
    """

    def __init__(self, experiment: Experiment, folder: RunFolder, identity: str) -> None:
        self.sinks = SinkSet(experiment.run.sinks)
        self._experiment, self._folder, self._identity = experiment, folder, identity
        self._recorder = Recorder()

    def handle(self, event: Event) -> None:
        """Open the sinks when the run starts, and write to them when a round is complete.

        Raises:
            ConfigError: a sink of a new run cannot be opened.
        """
        self._recorder.handle(event)
        if isinstance(event, RunStarted):
            self._open(event.done)
        elif isinstance(event, RoundComplete):
            self.sinks.write(
                round_records(event.round, self._recorder.take(), event.up, event.down, seconds=event.seconds)
            )

    def _open(self, done: int) -> None:
        """One that does not open must not keep a run from being resumed."""
        cfg = self._experiment
        content, name = cfg.model_dump(mode="json"), f"{cfg.name}-seed{cfg.run.seed}"
        run = SinkRun(self._folder.path, name, content, done, self._identity)
        self.sinks.open(run, lenient=self._folder.has_checkpoints())  # a new run has nothing to lose yet
