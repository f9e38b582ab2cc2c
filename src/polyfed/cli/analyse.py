"""``polyfed analyse`` and ``downstream``: analyses of runs and experiments, and tests of encoders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.console import interruptible
from polyfed.cli.options import EXPERIMENT, BestOrLast, ExperimentOptions, PlaceOptions
from polyfed.core.errors import ConfigError
from polyfed.runs.config_files import override_in

if TYPE_CHECKING:
    from polyfed.lab.analysis.analysis import AnalysisResult


def analyse_command(
    name: Annotated[
        str, typer.Argument(metavar="[NAME|FILE.py:Class]", help="an analysis; without one, all with their settings")
    ] = "",
    sources: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN|PRESET|FILE]", help=f"folder of a run; of cost and partition also {EXPERIMENT}"),
    ] = None,
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="a setting of the analysis; of cost and partition also others"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="folder; by default RUN/analysis, of an experiment runs/<name>-<analysis>")
    ] = None,
    opening: PlaceOptions,
) -> None:
    """Analyse a run: who holds what, what a round costs, and what the run leaked.

    Examples: polyfed analyse; polyfed analyse leakage runs/a --set samples=200; polyfed analyse cost scenes-demo;
    polyfed analyse papers/fedcola/landscape.py:Landscape runs/mine --set samples=64
    """
    from polyfed.lab.analysis.analysis import FOLDER, analysis_class, ready_folder, with_settings

    if not name:
        from polyfed.cli import catalogue

        for known, summary in catalogue.entries("analyses").items():
            typer.echo(f"{known}: {summary}")
            for one in catalogue.settings_of("analyses", known):
                typer.echo(f"  {one.name}={one.default}: {one.description}")
        typer.echo("those of papers: FILE.py:Class, such as papers/fedcola/landscape.py:Landscape")
        return
    chosen, folders = analysis_class(name), list(map(Path, sources or ()))
    if not folders:
        raise ConfigError(f"analyse {name}: give the folder of a run")
    own, others = _split(settings or [], chosen.model_fields if chosen.takes_experiments() else None)
    analysis = with_settings(chosen, own)
    if chosen.takes_experiments() and not folders[0].is_dir():
        experiment = ExperimentOptions(others, opening.data_dir, opening.weights_dir).load(str(folders[0]))
        folder = ready_folder(out or Path("runs") / f"{experiment.name}-{analysis.title()}")
        show_result(analysis.answer_experiment(experiment), folder, analysis.stem)
        return
    if others:
        raise ConfigError(f"--set {others[0]}: '{folders[0]}' is a run that is over; give its config.yaml instead")
    if len(folders) > 1:
        raise ConfigError(f"analysis '{analysis.title()}' takes one run, not {len(folders)}; give one at a time")
    run = opening.open(folders[0])
    folder = ready_folder(out or folders[0] / FOLDER)
    show_result(analysis.answer(run), folder, analysis.stem)
    if analysis.is_reported and out is None:
        from polyfed.reporting.page import write_html_report, write_report

        typer.echo(f"written: {write_report(run.records)}")
        typer.echo(f"written: {write_html_report(run.records)}")


def show_result(result: AnalysisResult, folder: Path, name: str) -> None:
    """Print the tables, then write the files: hours of computing are shown even if the disk is full.

    Raises:
        RunError: the folder cannot be written to.
    """
    from polyfed.reporting.terminal import Terminal

    Terminal().print_tables(result.tables)
    for path in result.save(folder, name):
        typer.echo(f"written: {path}")


def _split(settings: list[str], known: Any) -> tuple[dict[str, Any], list[str]]:
    """Settings of the analysis by name, and those of an experiment, where the analysis takes one (``known``)."""
    given = {text: override_in(text) for text in settings}
    others = [text for text, (key, _) in given.items() if known is not None and key not in known]
    return dict(pair for text, pair in given.items() if text not in others), others


_SEED = 42


def downstream_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    *,
    suite: Annotated[str, typer.Option(help="scenes, or a YAML file")] = "",
    which: BestOrLast = None,
    client: Annotated[str | None, typer.Option(help="test this client's model instead of the server's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of all draws")] = _SEED,
    out: Annotated[Path | None, typer.Option(help="folder; by default RUN/downstream")] = None,
    opening: PlaceOptions,
) -> None:
    """Test a run's frozen encoders on other tasks: few-shot classification, retrieval, or probes of your own."""
    from polyfed.core.device import cpu_threads
    from polyfed.lab.analysis.analysis import ready_folder
    from polyfed.lab.downstream.suite import Suite, opened_model, run_suite, suites

    if not suite:
        raise ConfigError(f"--suite is missing; give {', '.join(suites())}, or a YAML file")
    chosen = Suite.load(suite)
    opened = opened_model(opening.open(run), which, client)
    folder = ready_folder(out or run.joinpath("downstream", client or ""))  # a client's apart from the server's
    with cpu_threads(opened.threads), interruptible("nothing was written"):
        findings = run_suite(opened.subject, chosen, opened.data, name=Path(suite).stem, seed=seed, on_task=typer.echo)
    show_result(findings, folder, _stem(Path(suite).stem, which, seed))


def _stem(suite: str, which: str | None, seed: int) -> str:
    """Name of the files without ending: the suite, and what is asked for beyond the defaults."""
    asked = {"model": which, "seed": None if seed == _SEED else seed}
    parts = [suite, *(f"{option}-{value}" for option, value in asked.items() if value is not None)]
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))
