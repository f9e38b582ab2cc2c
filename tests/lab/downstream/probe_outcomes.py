"""What probes find, for tests."""

from __future__ import annotations

from polyfed.lab.downstream.probe import Bench, Outcome, Probe


def outcome(probe: Probe, bench: Bench) -> Outcome:
    """Ask whether the probe suits, check and run it, as a suite does."""
    assert probe.unsuitable(bench) is None
    probe.check(bench, "task")
    return probe.run(bench, "task")


def values(found: Outcome) -> list[dict[str, list[float]]]:
    """Values of every row by metric."""
    return [{name: list(each) for name, each in row.values.items()} for row in found.rows]
