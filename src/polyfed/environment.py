"""Where a run takes place: device, versions, state of the code."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from polyfed.errors import ConfigError
from polyfed.experiment import Experiment

_PACKAGES = ("polyfed", "torch", "numpy", "transformers", "tokenizers", "datasets", "pyarrow", "pillow")


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` takes the first CUDA device if there is one.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"run.device '{name}' is not usable here ({str(error).splitlines()[0]}); try auto") from error
    return device


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Compute with so many CPU threads within a block: floating-point sums depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment(experiment: Experiment) -> dict[str, Any]:
    """What one must know to repeat a run beyond its configuration."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(resolve_device(experiment.run.device)),
        "threads": experiment.run.threads,
        "seed": experiment.run.seed,
        "versions": {name: version(name) for name in _PACKAGES},
        "git": _git_state(),
    }


def _git_state() -> str | None:
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
