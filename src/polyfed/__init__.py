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

from polyfed.errors import PolyfedError

if TYPE_CHECKING:
    from polyfed.evaluation import evaluate_model
    from polyfed.experiment import Experiment
    from polyfed.export import export_model
    from polyfed.runner import Run, resume, run

__version__ = "0.1.0"
__all__ = [
    "Experiment",
    "PolyfedError",
    "Run",
    "__version__",
    "evaluate_model",
    "export_model",
    "resume",
    "run",
]

# imported when first used: torch takes seconds, and the command line must answer at once
_HOMES = {
    "Experiment": "polyfed.experiment",
    "Run": "polyfed.runner",
    "evaluate_model": "polyfed.evaluation",
    "export_model": "polyfed.export",
    "resume": "polyfed.runner",
    "run": "polyfed.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'polyfed' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
