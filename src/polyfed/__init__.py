"""polyfed: multimodal federated learning.

Image clients, text clients and image-text clients, each with data, task and architecture of its own, train
together without sharing data:

    from polyfed import Experiment, run

    result = run(Experiment.load("demo"), out="runs/mine")
    print(result.metrics())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import PolyfedError
from polyfed.core.version import __version__
from polyfed.engines.quiet import be_fast

if TYPE_CHECKING:
    from polyfed.data.sources.memory import register_data
    from polyfed.export.model import export_model
    from polyfed.export.programs import load_model
    from polyfed.lab.studies.opened import open_study
    from polyfed.lab.studies.runner import run_study
    from polyfed.lab.studies.study import Study
    from polyfed.models.encoders.registered import register_module
    from polyfed.reporting.api import compare, plot, report, resume, run
    from polyfed.runs.evaluation import evaluate_model
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.opened import Run, open_run

be_fast()  # here, as whatever imports torch of polyfed's modules, command or worker, imports this before

__all__ = [
    "Experiment",
    "PolyfedError",
    "Run",
    "Study",
    "__version__",
    "compare",
    "evaluate_model",
    "export_model",
    "load_model",
    "open_run",
    "open_study",
    "plot",
    "register_data",
    "register_module",
    "report",
    "resume",
    "run",
    "run_study",
]

# imported when first used: torch takes seconds, and the command line must answer at once
_HOMES = {
    "Experiment": "polyfed.runs.experiment",
    "Run": "polyfed.runs.opened",
    "compare": "polyfed.reporting.api",
    "evaluate_model": "polyfed.runs.evaluation",
    "export_model": "polyfed.export.model",
    "load_model": "polyfed.export.programs",
    "open_run": "polyfed.runs.opened",
    "open_study": "polyfed.lab.studies.opened",
    "plot": "polyfed.reporting.api",
    "register_data": "polyfed.data.sources.memory",
    "register_module": "polyfed.models.encoders.registered",
    "report": "polyfed.reporting.api",
    "resume": "polyfed.reporting.api",
    "run": "polyfed.reporting.api",
    "run_study": "polyfed.lab.studies.runner",
    "Study": "polyfed.lab.studies.study",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'polyfed' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
