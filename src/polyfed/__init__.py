"""polyfed: multimodal federated learning.

Image clients, text clients and image-text clients, each with data, task and architecture of its own, train
together without sharing data:

    from polyfed import Experiment, run

    result = run(Experiment.load("scenes-demo"), out="runs/demo")
    print(result.metrics())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import PolyfedError
from polyfed.core.version import __version__

if TYPE_CHECKING:
    from polyfed.data.registered import register_data
    from polyfed.export.loading import load_model
    from polyfed.export.model import export_model
    from polyfed.models.registered import register_module
    from polyfed.reporting.reported import resume, run
    from polyfed.reporting.reported_run import ReportedRun as Run
    from polyfed.reporting.reported_run import open_reported as open_run
    from polyfed.runs.evaluation import evaluate_model
    from polyfed.runs.experiment import Experiment
    from polyfed.studies.session import run_study
    from polyfed.studies.study import Study

__all__ = [
    "Experiment",
    "PolyfedError",
    "Run",
    "Study",
    "__version__",
    "evaluate_model",
    "export_model",
    "load_model",
    "open_run",
    "register_data",
    "register_module",
    "resume",
    "run",
    "run_study",
]

# imported when first used: torch takes seconds, and the command line must answer at once
_HOMES = {
    "Experiment": "polyfed.runs.experiment",
    "Run": "polyfed.reporting.reported_run:ReportedRun",
    "evaluate_model": "polyfed.runs.evaluation",
    "export_model": "polyfed.export.model",
    "load_model": "polyfed.export.loading",
    "open_run": "polyfed.reporting.reported_run:open_reported",
    "register_data": "polyfed.data.registered",
    "register_module": "polyfed.models.registered",
    "resume": "polyfed.reporting.reported",
    "run": "polyfed.reporting.reported",
    "run_study": "polyfed.studies.session",
    "Study": "polyfed.studies.study",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'polyfed' has no attribute '{name}'")
    module, _, own = _HOMES[name].partition(":")  # with what it is called there, if that is another name
    return getattr(importlib.import_module(module), own or name)


def __dir__() -> list[str]:
    return sorted(__all__)
