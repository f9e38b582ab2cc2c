"""Running experiments, and what a run leaves."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polyfed.core.device import cpu_threads
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.progress import Progress, Reporter, SilentProgress, unreported
from polyfed.runs.records import RunRecords
from polyfed.runs.session import Session


@dataclass(frozen=True)
class Run:
    """A run on disk."""

    folder: Path

    @cached_property
    def records(self) -> RunRecords:
        """Metrics, events, bytes and partition."""
        return RunRecords.load(self.folder)

    def metrics(self, participant: str = "server", kind: str = "test") -> Mapping[str, float]:
        """The last metrics of a participant."""
        return self.records.last(participant, kind)


def run(
    experiment: Experiment, out: Path | str, progress: Progress | None = None, reporter: Reporter = unreported
) -> Run:
    """Run an experiment into a new folder; ``polyfed.run`` does, and reports the run as well.

    Raises:
        PolyfedError: something does not fit; nothing is left at ``out`` unless the run had begun.
    """
    with cpu_threads(experiment.run.threads), RunFolder.create(Path(out)) as folder, folder.lock():
        Session(experiment, folder, progress or SilentProgress(), secrets.token_hex(8), reporter).start()
    return Run(Path(out))


def resume(folder: Path | str, progress: Progress | None = None, reporter: Reporter = unreported) -> Run:
    """Continue a run after its last complete round; the result is that of an uninterrupted run, bit for bit.

    Raises:
        RunError: not a run folder, its configuration was edited, or no checkpoint is readable.
    """
    opened = RunFolder.existing(Path(folder))
    experiment = Experiment.load(opened.path / "config.yaml")
    with cpu_threads(experiment.run.threads), opened.lock():
        Session(experiment, opened, progress or SilentProgress(), opened.identity, reporter).resume()
    return Run(opened.path)
