"""A run and its rounds as they are told to sinks."""

from __future__ import annotations

import math
from pathlib import Path

from polyfed.runs.events import Incident, Measured, RoundComplete
from polyfed.runs.sink import Record, SinkRun, Trackers, round_records

CONFIG = {"name": "demo", "run": {"rounds": 3, "seed": 0}, "clients": [{"dim": 8}, {"dim": 16}], "server": None}


def sink_run(folder: Path, resumed_from: int = 0) -> SinkRun:
    folder.mkdir(exist_ok=True)
    return SinkRun(folder, "demo", CONFIG, "run-0001", resumed_from)


def complete(trackers: Trackers, number: int) -> None:
    """Tell of a round as the loop does."""
    for record in a_round(number):
        if record["kind"] == "event":
            trackers.handle(Incident(number, record["participant"], record["event"], record["reason"]))
        elif record["kind"] == "test":
            trackers.handle(Measured(number, record["participant"], "test", record["metrics"]))
    trackers.handle(RoundComplete(number, 1.5, 7, 5))


def a_round(number: int) -> list[Record]:
    metrics = [
        {"round": number, "participant": "server", "kind": "test", "metrics": {"image_to_text_r@1": 10.0 * number}},
        {"round": number, "participant": "image-0", "kind": "test", "metrics": {"accuracy": 20.0}},
        {"round": number, "participant": "image-1", "kind": "test", "metrics": {"accuracy": 40.0, "loss": math.nan}},
        {"round": number, "participant": "image-2", "kind": "event", "event": "client_excluded", "reason": "no answer"},
    ]
    return round_records(number, metrics, 7, 5, seconds=1.5)


EXPECTED = {
    "server/test/image_to_text_r@1": 10.0,
    "client/image-0/test/accuracy": 20.0,
    "client/image-1/test/accuracy": 40.0,
    "clients/test/accuracy": 30.0,
    "events/client_excluded": 1.0,
    "server/traffic/bytes_up": 7.0,
    "server/traffic/bytes_down": 5.0,
    "server/timing/seconds": 1.5,
}
