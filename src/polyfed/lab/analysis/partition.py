"""Holdings of the clients of a run, or of an experiment before it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyfed.core.errors import ConfigError, RunError
from polyfed.federation.population import Population
from polyfed.lab.analysis.analysis import Analysis, AnalysisResult
from polyfed.reporting.run_figures import partition_sheet
from polyfed.reporting.run_tables import partition_tables
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.preflight import require_readable
from polyfed.runs.records import PartitionEntry, RunRecords


class Partition(Analysis):
    """Count and draw the items of every client, by class and column, without training."""

    def answer(self, run: Run) -> AnalysisResult:
        return held_items(run.records)

    def answer_experiment(self, experiment: Experiment) -> AnalysisResult:
        return held_items(planned_holdings(experiment))


def planned_holdings(experiment: Experiment, read: bool = False) -> RunRecords:
    """Holdings of every client of an experiment, without decoding images or building models.

    Args:
        experiment: The experiment.
        read: True to read one sample of each kind of participant, through its views and networks.

    Raises:
        ConfigError, DataError: The partition is impossible, the clients are at other sites, or a sample is unreadable.
    """
    cfg = experiment
    if not cfg.clients:
        raise ConfigError(f"'{cfg.name}' has no clients of its own to deal items out to; add groups under 'clients'")
    federation = Population(cfg.data, cfg.public, cfg.server, cfg.clients, cfg.run.seed)
    federation.data.ahead = False
    if read:
        require_readable(federation)
    entries: dict[str, Any] = {name: federation.holding(member) for name, member in federation.members.items()}
    return RunRecords(Path(cfg.name), holdings={name: PartitionEntry(**entry) for name, entry in entries.items()})


def held_items(records: RunRecords) -> AnalysisResult:
    """Items of every client by class and column, without their numbers.

    Raises:
        RunError: The run has no holdings.
    """
    if not records.holdings:
        raise RunError(f"'{records.folder}' has no partition.json; give the folder of a run")
    content = {}
    for client, holding in records.holdings.items():
        entry = _counts(asdict(holding))
        content[client] = entry | {part: _counts(entry[part]) for part in ("test", "also") if entry[part] is not None}
    sheet = partition_sheet(records)
    return AnalysisResult(content, partition_tables(records.holdings), sheet.draw if sheet else None)


def _counts(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "index"}
