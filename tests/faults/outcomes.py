"""What is compared, and what is read, of a run that something happened to."""

from __future__ import annotations

from pathlib import Path

from polyfed.runs.records import RunRecords

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
