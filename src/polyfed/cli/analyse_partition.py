"""``polyfed analyse partition``: who holds what, before anything is trained; parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.analysing import Folder, Overrides, analysed, show_analysis
from polyfed.cli.options import EXPERIMENT, DataDir, WeightsDir
from polyfed.core.errors import ConfigError

Subject = Annotated[
    str, typer.Argument(metavar="PRESET|FILE|RUN", help=f"{EXPERIMENT}, or folder of a run", show_default=False)
]


def partition(
    source: Subject,
    overrides: Overrides = None,
    out: Folder = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Count what every client holds, by class and column, and draw it; nothing is trained."""
    from polyfed.analysis.partitions import planned, recorded, without_items
    from polyfed.analysis.results import ready_folder
    from polyfed.reporting.partition_tables import partition_tables
    from polyfed.reporting.plots import draw_partition
    from polyfed.runs.opened import open_run

    if Path(source).is_dir():
        if overrides:
            raise ConfigError(f"--set {overrides[0]}: '{source}' is a run that is over; give its config.yaml instead")
        records, folder = recorded(open_run(source)), out or Path(source) / "analysis"
    else:
        experiment = analysed(source, overrides, data_dir, weights_dir)
        records, folder = planned(experiment), out or Path("runs") / f"{experiment.name}-partition"
    holdings = {client: without_items(holding) for client, holding in records.holdings.items()}
    show_analysis(
        ready_folder(folder), "partition", holdings, draw_partition(records), partition_tables(records.holdings)
    )
