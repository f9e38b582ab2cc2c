"""The command line: parses, calls the API, prints."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from polyfed.cli.analyse import app as analyse
from polyfed.cli.console import described, in_charge
from polyfed.cli.deploy import app as deploy
from polyfed.cli.downstream import downstream
from polyfed.cli.options import BestOrLast, DataDir, Device, ExperimentArgument, WeightsDir, numbers_in, pairs_in
from polyfed.core.errors import ConfigError, PolyfedError
from polyfed.core.extras import extra_with, how_to_install
from polyfed.core.files import private_files
from polyfed.core.untrusted import plain
from polyfed.core.version import __version__
from polyfed.engines.quiet import SPEED
from polyfed.runs.opened import open_run

if TYPE_CHECKING:
    from rich.console import Console

    from polyfed.reporting.tables import TextTable
    from polyfed.runs.events import Callback
    from polyfed.runs.experiment import Experiment

# read when these libraries are first imported, which is later: torch and transformers take seconds
_QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    **SPEED,
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Multimodal federated learning: image, text and image-text clients train without sharing data.",
)

app.add_typer(deploy, name="deploy")
app.add_typer(analyse, name="analyse")
app.command()(downstream)

RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run", show_default=False)]
Dashboard = Annotated[bool, typer.Option("--dashboard", help="fill the terminal with all that goes on")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 2 for what the user can mend, 130 for an interruption."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    with private_files(), in_charge():
        return _carried_out(arguments)


def _carried_out(arguments: Sequence[str] | None) -> int:
    try:
        command = described(typer.main.get_command(app))
        code = command(arguments, prog_name="polyfed", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _fail(f"error: {error.format_message()}", error.exit_code)
    except click.Abort:
        return _fail("interrupted", 130)
    except PolyfedError as error:
        return _fail(f"error: {error}", 2)
    except ModuleNotFoundError as error:
        extra = extra_with(error.name or "")
        if extra is None:
            raise
        return _fail(f"error: this needs the package '{error.name}', which is not there; {how_to_install(extra)}", 2)
    return int(code or 0)


@app.command()
def run(
    source: ExperimentArgument,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override a setting, such as run.rounds=5", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    out: Annotated[
        Path | None,
        typer.Option(help="run folder (-seedN is added with --seeds); else runs/<name>-seed<seed>", show_default=False),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="same as --set run.rounds=", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="same as --set run.seed=", show_default=False)] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="a run with each of these seeds, in turn", show_default=False)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, ...; same as --set run.device=", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="local, ray or flower; same as --set run.engine.name=", show_default=False),
    ] = None,
    dashboard: Dashboard = False,
) -> None:
    """Run an experiment and report on it.

    Examples: polyfed run scenes-demo; polyfed run scenes-demo --rounds 4 --set algorithm=local --out runs/local;
    polyfed run shop.yaml --data-dir my-data --seeds 0,1,2
    """
    from polyfed.runs.experiment import Experiment

    if seeds is not None and seed is not None:
        raise ConfigError(f"--seeds {seeds} and --seed {seed} exclude each other; give one of them")
    named = {
        "run.engine.name": engine,
        "run.rounds": rounds,
        "run.device": device,
        "data.dir": _absolute(data_dir),
        "data.weights_dir": _absolute(weights_dir),
    }
    given = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    drawn = numbers_in("--seeds", seeds) if seeds is not None else [seed]
    experiments = [
        Experiment.load(source, [*(overrides or []), *given, *([] if number is None else [f"run.seed={number}"])])
        for number in drawn
    ]
    for experiment in experiments:
        number = experiment.run.seed
        wanted = out if out is None or seeds is None else out.with_name(f"{out.name}-seed{number}")
        _run_into(experiment, wanted or _free_folder(f"{experiment.name}-seed{number}"), dashboard, Path(source).parent)


def _run_into(experiment: Experiment, folder: Path, dashboard: bool, base: Path) -> None:
    from polyfed.reporting.progress import FolderLine
    from polyfed.reporting.reported import run as run_experiment

    console = _console()
    with _reported(console, folder, dashboard) as shown:
        callbacks = [FolderLine(folder, console), shown]
        if _is_deployed(experiment):
            from polyfed.deploy.launch import launch

            launch(experiment, folder, callbacks, base=base)
        else:
            run_experiment(experiment, folder, callbacks)


@app.command()
def resume(run: RunFolderArgument, dashboard: Dashboard = False) -> None:
    """Continue a run after its last complete round.

    Example: polyfed resume runs/scenes-demo-seed0
    """
    from polyfed.reporting.reported import resume as resume_run

    deployed = _is_deployed(open_run(run).experiment)
    with _reported(_console(), run, dashboard) as shown:
        if deployed:
            from polyfed.deploy.launch import relaunch

            relaunch(run, [shown])
        else:
            resume_run(run, [shown])


@app.command()
def watch(run: RunFolderArgument) -> None:
    """Show a run that another process works on, live, on this terminal.

    Example: polyfed watch runs/scenes-demo-seed0
    """
    from polyfed.reporting.dashboard import DashboardProgress
    from polyfed.runs.event_log import PROGRESS, follow

    opened = open_run(run)
    folder = opened.files
    shown = DashboardProgress(_console(), opened.records)
    with contextlib.closing(shown):
        shown.show()
        ended = follow(run / PROGRESS, shown, run, finished=lambda: not folder.is_worked_on())
    if not ended:
        typer.echo(f"nobody is working on this run; continue it with: polyfed resume {run}")


@app.command()
def report(
    run: RunFolderArgument,
    out: Annotated[Path | None, typer.Option(help="file; by default RUN/report.html", show_default=False)] = None,
) -> None:
    """Write the report of a run, finished or not, as one HTML file."""
    from polyfed.reporting.html.page import write_html_report

    typer.echo(f"written: {write_html_report(open_run(run).records, out)}")


@app.command()
def evaluate(
    run: RunFolderArgument,
    data: Annotated[str, typer.Option(help="a source of the run, or a folder of Parquet files", show_default=False)],
    split: Annotated[str, typer.Option(help="split of it")] = "test",
    which: BestOrLast = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="MODALITY=COLUMN", help="column of a Parquet folder", show_default=False),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="TARGET=COLUMN", help="column with labels of a Parquet folder", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure a run's server model on any data set.

    Examples: polyfed evaluate runs/shop-seed0 --data shop --split validation; polyfed evaluate runs/shop-seed0
    --data other-shop --data-dir my-data --column text=title
    """
    from polyfed.reporting.report import evaluation_tables
    from polyfed.runs.evaluation import Target, evaluate_model

    wanted = Target(data, split, columns=pairs_in("--column", column), targets=pairs_in("--target", target))
    evaluation = evaluate_model(run, wanted, which=which, data_dir=data_dir, weights_dir=weights_dir, device=device)
    if as_json:
        typer.echo(json.dumps({"run": str(run), **vars(evaluation)}, indent=1))
    else:
        _print(*evaluation_tables(evaluation))


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(help="presets, settings, methods, models, data, ...", show_default=False)] = "",
    name: Annotated[str, typer.Argument(help="one of them, to see its settings", show_default=False)] = "",
    as_json: AsJson = False,
) -> None:
    """Show what there is: presets, methods, models, data sources, and their settings.

    Examples: polyfed list; polyfed list presets; polyfed list presets scenes-demo; polyfed list models resnet
    """
    from polyfed.cli import listing

    if as_json:
        typer.echo(json.dumps(listing.as_json(kind, name), indent=1))
    else:
        for line in listing.lines(kind, name):
            typer.echo(line)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs", show_default=False)],
    metric: Annotated[str | None, typer.Option(help="by default r1_sum or accuracy", show_default=False)] = None,
    kind: Annotated[str, typer.Option(help="test or validation")] = "test",
    plot: Annotated[Path | None, typer.Option(help="draw curves into this PNG", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Compare runs; those that differ only by their seed are taken together.

    Example: polyfed compare runs/shop-* --metric accuracy --plot comparison.png
    """
    from polyfed.reporting import compare as comparing

    comparison = comparing.compare([open_run(folder).records for folder in runs], metric, kind)
    if as_json:
        typer.echo(json.dumps(comparing.comparison_rows(comparison), indent=1))
    else:
        tables = (comparing.comparison_table(comparison), comparing.clients_comparison_table(comparison))
        _print(*(table for table in tables if table.rows))
    if plot is not None:
        typer.echo(f"drawn: {comparing.draw_comparison(comparison, plot, metric, kind)}", err=as_json)


@app.command()
def export(
    run: RunFolderArgument,
    out: Annotated[Path | None, typer.Option(help="new folder; by default RUN/export", show_default=False)] = None,
    which: BestOrLast = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Export a run's server model for use without polyfed.

    Example: polyfed export runs/shop-seed0 --out shop-model
    """
    from polyfed.export.model import export_model

    typer.echo(f"exported and checked: {export_model(run, out, which=which, weights_dir=weights_dir)}")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polyfed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="show it")] = False,
) -> None:
    """Options of the program itself."""


# ---- parsing


def _absolute(folder: Path | None) -> str | None:
    """A run is resumed from anywhere, so its configuration holds whole paths."""
    return None if folder is None else str(folder.resolve())


def _free_folder(name: str) -> Path:
    first, number = Path("runs") / name, 1
    folder = first
    while folder.exists():
        number += 1
        folder = first.with_name(f"{name}-{number}")
    return folder


def _is_deployed(experiment: Any) -> bool:
    from polyfed.engines.flower import Flower

    return isinstance(experiment.run.engine, Flower) and experiment.run.engine.is_deployed


# ---- printing


def _console() -> Console:
    from polyfed.reporting.terminal import Terminal

    return Terminal()


def _print(*tables: TextTable) -> None:
    console = _console()
    for table in tables:
        console.print(table.rich())


def _fail(message: str, code: int) -> int:
    typer.echo(plain(" ".join(message.split())), err=True)
    return code


@contextlib.contextmanager
def _reported(console: Console, folder: Path, dashboard: bool) -> Iterator[Callback]:
    """What shows a run in ``folder``; an interruption says how to go on."""
    from polyfed.reporting.dashboard import DashboardProgress
    from polyfed.reporting.progress import progress_for

    progress = DashboardProgress(console) if dashboard else progress_for(console)
    try:
        yield progress
    except KeyboardInterrupt:
        progress.close()
        begun = (folder / "run.json").is_file()
        hint = f"continue with: polyfed resume {folder}" if begun else "nothing was written"
        raise typer.Exit(_fail(f"interrupted; {hint}", 130)) from None
    finally:
        progress.close()
