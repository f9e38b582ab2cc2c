"""Where a run takes place: device, versions, state of the code."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polyfed.core.device import resolve_device
from polyfed.runs.experiment import Experiment

PACKAGES = ("polyfed", "torch", "numpy", "transformers", "tokenizers", "datasets", "pyarrow", "pillow")


def environment(experiment: Experiment) -> dict[str, Any]:
    """What one must know to repeat a run beyond its configuration."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(resolve_device(experiment.run.device)),
        "threads": experiment.run.threads,
        "seed": experiment.run.seed,
        "versions": {name: _version(name) for name in PACKAGES} | {"torch": torch.__version__},  # with its build
        "git": _git_state(),
    }


_version = cache(version)


@cache  # of the code that this process has loaded, whatever happens to the files
def _git_state() -> str | None:
    here = Path(__file__).parent
    try:
        completed = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None  # an installed wheel is no checkout, and git may not be there
    return completed.stdout.strip()
