"""Columns and an engine outside polyfed: a study names them by import path, and its cells import them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from polyfed.engines.local import InProcess
from polyfed.lab.studies.column import ColumnSettings
from polyfed.runs.opened import Run


class Rounds(ColumnSettings):
    """Rounds of the run."""

    def measure(self, run: Run) -> float:
        return float(run.records.rounds)


class OfModels(ColumnSettings):
    """Files of saved models: 0 if they are not kept."""

    @property
    def needs_models(self) -> bool:
        return True

    def measure(self, run: Run) -> float:
        return float(len(list((run.folder / "models").rglob("*.safetensors"))))


class FullDisk(ColumnSettings):
    """Ends as a full disk does."""

    def measure(self, run: Run) -> float:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cell")


class Killed(ColumnSettings):
    """Takes its process with it, once."""

    marker: str

    def measure(self, run: Run) -> float:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), 9)
        return 1.0


class Elsewhere(InProcess):
    """An engine that polyfed does not know."""
