"""Finished runs as if their settings had been others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyfed.runs.opened import Run


def with_settings(run: Run, **changes: Any) -> Run:
    """The run with other settings of its experiment; what it left on disk is the same."""
    changed = replace(run)
    vars(changed)["experiment"] = run.experiment.model_copy(update=changes)
    return changed
