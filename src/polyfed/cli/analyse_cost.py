"""``polyfed analyse cost``: what a round costs; parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.analysis_options import OutOfExperiment, show_analysis
from polyfed.cli.options import ExperimentArgument, ExperimentOptions, names_in
from polyfed.core.errors import ConfigError


def analyse_cost(
    source: ExperimentArgument,
    *,
    number: Annotated[int, typer.Option("--round", min=1, help="which round; those before are run too")] = 1,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="bytes alone, of blank data and models without pretrained weights")
    ] = False,
    classes: Annotated[
        str | None, typer.Option(metavar="SOURCE=N,...", help="with --without-data: classes of labelled sources")
    ] = None,
    words: Annotated[
        int, typer.Option(min=3, help="with --without-data: vocabulary of tokenizers that are files (BERT: 30522)")
    ] = 30_522,
    settings: ExperimentOptions,
    out: OutOfExperiment = None,
) -> None:
    """Measure a round of one client of each kind: operations, parameters, memory, seconds and bytes."""
    from polyfed.lab.analysis.results import ready_folder

    experiment = settings.load(source)
    folder = ready_folder(out or Path("runs") / f"{experiment.name}-cost")
    if without_data:
        from polyfed.lab.analysis.planned_traffic import planned_tables, planned_traffic

        planned = planned_traffic(experiment, _counts(classes), words)
        show_analysis(folder, "traffic", planned.to_json(), None, planned_tables(planned))
    elif classes is not None:
        raise ConfigError(f"--classes {classes}: the data say it themselves; give it with --without-data")
    else:
        from polyfed.lab.analysis.cost import cost_tables, round_costs

        costs = round_costs(experiment, number)
        show_analysis(folder, "cost", costs.to_json(), None, cost_tables(costs))


def _counts(classes: str | None) -> dict[str, int]:
    """Source -> number of its classes."""
    pairs = [entry.partition("=") for entry in names_in("--classes", classes)] if classes is not None else []
    for name, _, number in pairs:
        if not name or not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--classes {classes}: needs SOURCE=N with N from 1 on, as in cifar100=100")
    return {name: int(number) for name, _, number in pairs}
