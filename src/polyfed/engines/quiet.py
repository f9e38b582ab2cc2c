"""What keeps the libraries below polyfed from calling home, and from installing anything while a run goes on."""

from __future__ import annotations

import os

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


def be_quiet() -> None:
    """Set them in this process, for what is imported and started from now on; those that are set stay."""
    for variable, value in QUIET.items():
        os.environ.setdefault(variable, value)
