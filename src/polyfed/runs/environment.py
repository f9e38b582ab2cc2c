"""Environment of a run: device, versions, state of the code; and obstacles to a run."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from polyfed.core.device import resolve_device, usable_cores
from polyfed.core.extras import how_to_install, is_installed, known_extras
from polyfed.core.version import __version__
from polyfed.federation.settings import DataSettings
from polyfed.runs.experiment import Experiment

PACKAGES = ("polyfed", "torch", "numpy", "transformers", "tokenizers", "datasets", "pyarrow", "pillow")


def environment(experiment: Experiment) -> dict[str, Any]:
    """Facts beyond the configuration that a repetition of the run needs."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernels": torch.backends.cpu.get_cpu_capability(),  # last bits differ between them
        "device": str(resolve_device(experiment.run.device)),
        "threads": experiment.run.threads,
        "seed": experiment.run.seed,
        "versions": {**_versions(), "polyfed": __version__, "torch": torch.__version__},  # with its build
        "git": _git_state(),
    }


@cache
def _versions() -> dict[str, str]:
    """Versions of the packages that figures depend on, extras included where installed."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache  # of the code that this process has loaded, whatever happens to the files
def _git_state() -> str | None:
    here = Path(__file__).parent
    try:
        completed = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # an installed wheel is not a checkout, and git may be missing
    return completed.stdout.strip()


_LEAST_DISK = 2 << 30  # bytes: a cache of images, and checkpoints of a small run
_FOLDERS = {"POLYFED_DATA": "data sets", "POLYFED_WEIGHTS": "pretrained weights"}


@dataclass(frozen=True)
class Observation:
    """One line of the report of ``polyfed doctor``.

    Attributes:
        name: Subject of the line.
        state: Its state.
        remedy: Action to take; empty: none is needed.
    """

    name: str
    state: str
    remedy: str = ""


def observations(here: Path) -> Iterator[Observation]:
    """All observations, in the order of the report; runs would be written into ``here``."""
    yield Observation("polyfed", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    packages = (f"{name} {version}" for name, version in _versions().items() if name != "polyfed")
    yield Observation("packages", ", ".join(packages))
    pages = "SC_PHYS_PAGES" in os.sysconf_names
    memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory" if pages else ""
    yield Observation("machine", f"{usable_cores()} cores{memory}")
    yield _gpus()
    for extra in known_extras():
        state = "installed" if is_installed(extra) else f"not installed: {how_to_install(extra)}"
        yield Observation(f"extra {extra}", state)
    yield from _torchvision()
    if (threads := os.environ.get("OMP_NUM_THREADS")) is not None:
        yield Observation("OMP_NUM_THREADS", f"{threads}; run.threads sets what a run uses")
    for variable, what in _FOLDERS.items():
        given = os.environ.get(variable)
        is_there = not given or Path(given).expanduser().is_dir()
        remedy = "" if is_there else f"the folder of {what} does not exist; correct or unset {variable}"
        yield Observation(variable, given or "not set", remedy)
    yield _writable("cache", DataSettings(sources={}).cache_folder)
    yield _writable("runs", here)


def _gpus() -> Observation:
    build = torch.version.cuda or "no CUDA"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return Observation("GPU", f"{', '.join(names)} (torch {torch.__version__}, CUDA {build})")
    if torch.backends.mps.is_available():
        return Observation("GPU", f"Apple's (torch {torch.__version__}); runs use it with run.device=mps")
    state = f"none that torch {torch.__version__} ({build}) can use"
    remedy = "this torch has no CUDA; install one that has: https://pytorch.org/get-started"
    if torch.version.cuda is not None:
        remedy = f"the driver is too old for CUDA {torch.version.cuda}, or the GPU is hidden"
    return Observation("GPU", state, remedy if shutil.which("nvidia-smi") else "")


def _torchvision() -> Iterator[Observation]:
    """State of torchvision: one of another build breaks its importers, transformers included; polyfed needs none."""
    try:
        version = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a wrong build raises whatever its loader does
        cause = " ".join(str(error).split())[:120]
        remedy = "it is of another build than torch; polyfed needs none: pip uninstall torchvision"
        yield Observation("torchvision", f"{version}, which cannot be imported ({cause})", remedy)
    else:
        yield Observation("torchvision", f"{version}; polyfed needs none")


def _writable(name: str, folder: Path) -> Observation:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    state = f"{folder}, {free / 2**30:,.0f} GiB free"
    if not os.access(existing, os.W_OK):
        return Observation(name, state, f"'{existing}' cannot be written to; choose another folder")
    return Observation(name, state, "too little; make room" if free < _LEAST_DISK else "")


def observation_lines(observed: list[Observation]) -> list[str]:
    """Lines for a terminal, or to paste into a bug report."""
    width = max(len(item.name) for item in observed)
    lines = [f"{one.name.ljust(width)}  {one.state}{f'  <- {one.remedy}' if one.remedy else ''}" for one in observed]
    problems = sum(bool(item.remedy) for item in observed)
    return [*lines, f"{problems} problem{'s' * (problems > 1)} found" if problems else "no problems found"]
