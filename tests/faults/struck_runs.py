"""Runs that something happens to: their engines, and what is compared and read of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyfed.runs.records import RunRecords

ENGINES: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "ray": {"name": "ray", "workers": 2},
    "flower": {"name": "flower", "nodes": 3},
}


def ready(config: dict[str, Any], folder: Path, engine: str, *, how: str, times: int = 1, **run: Any) -> dict[str, Any]:
    """An experiment in whose second round the client ``image`` is struck."""
    folder.mkdir(parents=True, exist_ok=True)
    method = {"name": "faulty.Struck", "how": how, "times": times, "counter": str(folder / "counter")}
    run = config["run"] | run | {"engine": ENGINES[engine], "on_error": "exclude"}
    return config | {"algorithm": config["algorithm"] | method, "run": run}


LOGS = ("metrics.jsonl", "ledger.jsonl")


def results(folder: Path) -> dict[str, bytes]:
    """Metrics, ledger and models, byte by byte: what must not depend on what happened, nor on the engine."""
    files = [*(folder / log for log in LOGS), *sorted((folder / "models").rglob("*.safetensors"))]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def events(folder: Path) -> list[tuple[int, str, str]]:
    """Round, client and kind of all events."""
    return [(event.round, event.participant, event.incident) for event in RunRecords.load(folder).events]


def reasons(folder: Path) -> dict[str, str]:
    """Client -> why it was excluded, the last time."""
    return {event.participant: event.reason for event in RunRecords.load(folder).excluded()}
