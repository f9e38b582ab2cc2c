"""Engines in the settings in which faults are tried on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 3},
}


def ready(config: dict[str, Any], folder: Path, engine: str, *, how: str, times: int = 1, **run: Any) -> dict[str, Any]:
    """An experiment in whose second round the client ``image`` is struck."""
    folder.mkdir(parents=True, exist_ok=True)
    method = {"name": "faulty.Struck", "how": how, "times": times, "counter": str(folder / "counter")}
    algorithm = config["algorithm"] | method
    return config | {"algorithm": algorithm, "run": config["run"] | run | {"engine": ENGINES[engine]}}
