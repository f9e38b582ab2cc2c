"""Environment variables for the libraries below polyfed: no telemetry, and good use of this machine."""

from __future__ import annotations

import os

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""Variables against telemetry and update checks."""

SPEED = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Large tensors in large pages, as numpy has its arrays: most of the time of a fresh 100 MB tensor is page faults."""

WAITING = {"GOMP_SPINCOUNT": "10000"}
"""Spins of a waiting thread before it releases its core, which another process may need: enough for the next small
operation on an idle machine. Two threads that never released theirs took 22 times as long next to other processes; two
that never spun took 1.7 times as long alone."""


def be_quiet() -> None:
    """Set ``QUIET`` in this process, for later imports and child processes; variables that are set stay."""
    os.environ.update({**QUIET, **os.environ})


def be_fast() -> None:
    """Set ``SPEED`` and ``WAITING`` likewise, before torch is imported."""
    os.environ.update({**SPEED, **({} if "OMP_WAIT_POLICY" in os.environ else WAITING), **os.environ})
