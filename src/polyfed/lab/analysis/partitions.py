"""Who holds what: in a run folder, or as an experiment would deal it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from polyfed.core.errors import ConfigError, RunError
from polyfed.federation.population import Population
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.partition_charts import partition_sheet
from polyfed.reporting.partition_tables import partition_tables
from polyfed.reporting.tables import TextTable
from polyfed.runs.opened import Run
from polyfed.runs.records import PartitionEntry, RunRecords

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.runs.experiment import Experiment


@dataclass(frozen=True)
class HeldItems(AnalysisResult):
    """What every client holds, by class and column.

    Attributes:
        records: with the holdings.
    """

    records: RunRecords

    @classmethod
    def planned(cls, experiment: Experiment) -> Self:
        """What every client of an experiment would hold; no picture is decoded and no model built.

        Raises:
            ConfigError, DataError: the items cannot be dealt out so, or the clients live elsewhere.
        """
        cfg = experiment
        if not cfg.clients:
            raise ConfigError(
                f"'{cfg.name}' has no clients of its own to deal items out to; add groups under 'clients'"
            )
        federation = Population(cfg.data, cfg.public, cfg.server, cfg.clients, cfg.run.seed)
        entries: dict[str, Any] = {name: federation.holding(member) for name, member in federation.members.items()}
        return cls(
            RunRecords(Path(cfg.name), holdings={name: PartitionEntry(**entry) for name, entry in entries.items()})
        )

    @classmethod
    def recorded(cls, run: Run) -> Self:
        """What every client of a run held.

        Raises:
            RunError: it has no partition.
        """
        if not run.records.holdings:
            raise RunError(f"'{run.folder}' has no partition.json; give the folder of a run")
        return cls(run.records)

    def to_json(self) -> dict[str, Any]:
        """Without the numbers of the items."""
        return {client: _without_items(holding) for client, holding in self.records.holdings.items()}

    def tables(self) -> list[TextTable]:
        return partition_tables(self.records.holdings)

    def draw(self) -> Figure | None:
        sheet = partition_sheet(self.records)
        return None if sheet is None else sheet.draw()


def _without_items(holding: PartitionEntry) -> dict[str, Any]:
    def counts(entry: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if name != "index"}

    held = counts(asdict(holding))
    return held | {part: counts(held[part]) for part in ("test", "also") if held[part] is not None}
