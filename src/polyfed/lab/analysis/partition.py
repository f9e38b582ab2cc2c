"""Who holds what: in a run folder, or as an experiment would deal it out."""

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
    """Count what every client holds, by class and column, and draw it; nothing is trained."""

    def answer(self, run: Run) -> AnalysisResult:
        return held_items(run.records)

    def answer_experiment(self, experiment: Experiment) -> AnalysisResult:
        return held_items(planned_holdings(experiment))


def planned_holdings(experiment: Experiment, read: bool = False) -> RunRecords:
    """What every client of an experiment would hold; no picture is decoded and no model built, unless one sample of
    each kind of participant is ``read``, through its views and networks.

    Raises:
        ConfigError, DataError: the items cannot be dealt out so, the clients live elsewhere, or a sample is not read.
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
    """What every client holds, by class and column, without the numbers of the items.

    Raises:
        RunError: nobody holds anything.
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
