"""What the libraries below polyfed read when they are imported: that they call nobody, and use this machine well."""

from __future__ import annotations

import os
from collections.abc import Mapping

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Environment variables."""

SPEED = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Large tensors in large pages, as numpy has its arrays: most of the time of a fresh 100 MB tensor is page faults."""

WAITING = {"GOMP_SPINCOUNT": "10000"}
"""Threads that wait for one another turn round so often before they let go of their cores, which another process may
need: long enough for the next small operation of a quiet machine. Two threads that never let go took 22 times as long
beside other processes; two that never turn round took 1.7 times as long alone."""


def be_quiet() -> None:
    """Set them in this process, for what is imported and started from now on; those that are set stay."""
    _set(QUIET)


def be_fast() -> None:
    """Likewise, before torch is imported."""
    _set(SPEED)
    if "OMP_WAIT_POLICY" not in os.environ:
        _set(WAITING)


def _set(variables: Mapping[str, str]) -> None:
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
