"""``polyfed run``, ``resume`` and ``watch``: parses, calls, and shows the run."""

from __future__ import annotations

import contextlib
import shlex
import traceback
from collections.abc import Iterator
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.console import fail, preparation_shown
from polyfed.cli.options import AllowCode, ExperimentArgument, ExperimentOptions, RunArgument, loaded, numbers_in
from polyfed.core.errors import ConfigError, PolyfedError, StepError
from polyfed.core.untrusted import lines
from polyfed.runs.opened import open_run

if TYPE_CHECKING:
    from polyfed.reporting.terminal import Terminal
    from polyfed.runs.events import Callback
    from polyfed.runs.experiment import Experiment


DEMO = "demo"
"""The preset that ``polyfed demo`` runs."""


def run_command(
    source: ExperimentArgument,
    *,
    settings: ExperimentOptions,
    out: Annotated[
        Path | None, typer.Option(help="run folder (-seedN is added with --seeds); else runs/<name>-seed<seed>")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="same as --set run.rounds=")] = None,
    seed: Annotated[int | None, typer.Option(help="same as --set run.seed=")] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="a run with each of these seeds, in turn")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, ...; same as --set run.device=")] = None,
    engine: Annotated[str | None, typer.Option(help="local, ray or flower; same as --set run.engine.name=")] = None,
    start: Annotated[Path | None, typer.Option("--from", metavar="RUN", help="start from the models of a run")] = None,
    sweep: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B,...", help="run a study of these values")] = None,
    twin: Annotated[
        str | None,
        typer.Option(
            help="run a twin in its place: server-only, no-private, local, pooled, zero-shot; same as --set twin.kind="
        ),
    ] = None,
    with_alone: Annotated[
        bool, typer.Option("--with-alone", help="run the twin local first, to show the gain of each client or site")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="check and build all, train one batch per kind of client, list what crosses"),
    ] = False,
) -> None:
    """Run an experiment and report on it.

    Examples: polyfed run scenes-demo; polyfed run scenes-demo --rounds 4 --set algorithm=fedmd --out runs/fedmd;
    polyfed run scenes-demo --twin server-only; polyfed run shop.yaml --data-dir my-data --seeds 0,1,2;
    polyfed run consortium.yaml --with-alone; polyfed run scenes-demo --sweep algorithm.distiller.weight=1,3
    --seeds 0,1,2 (repeated, all combinations); polyfed run scenes-demo --from runs/scenes-demo-seed0 --rounds 5
    """
    if seeds is not None and seed is not None:
        raise ConfigError(f"--seeds {seeds} and --seed {seed} exclude each other; give one of them")
    short_options = {"run.engine.name": engine, "run.rounds": rounds, "run.device": device, "twin.kind": twin}
    if start is not None:
        short_options["initial.run"] = str(start.resolve())  # paths of a file start from its folder
    numbers = [seed] if seeds is None else numbers_in("--seeds", seeds)
    # all are loaded before the first runs: a mistake in one shows at once
    experiments = [settings.load(source, {**short_options, "run.seed": number}) for number in numbers]
    if with_alone and (twin or experiments[0].run.engine.is_deployed):
        raise ConfigError("--with-alone has no effect on a twin, nor at the sites of a deployment; leave it out")
    if sweep and (twin or with_alone or dry_run):
        raise ConfigError("--sweep does not go with --twin, --with-alone or --dry-run; leave these out")
    if sweep:
        from polyfed.cli.sweep import run_sweep
        from polyfed.lab.studies.opened import STUDIES

        new = out or free_folder(STUDIES / f"{experiments[0].name}-sweep")
        run_sweep(source, experiments, settings.all_overrides(short_options), sweep, new)
        return
    from polyfed.runs.carried import with_round

    local = {**short_options, "twin.kind": "local"}
    alone = [settings.load(source, {**local, "run.seed": number}) for number in numbers] if with_alone else []
    if dry_run:
        _dry_run(with_round(experiments[0]))
        return
    for experiment, its_twin in zip_longest(experiments, alone):
        name = f"{experiment.name}-seed{experiment.run.seed}"
        folder = out if out is None or seeds is None else out.with_name(f"{out.name}-seed{experiment.run.seed}")
        folder = folder or free_folder(Path("runs") / name)
        if its_twin is not None:  # a federation's summary shows its gain over a finished twin
            local_folder = folder.with_name(f"{folder.name}-local")
            top = its_twin.start  # a run keeps the paths below it as relative ones
            asked = with_round(its_twin).to_yaml(top)
            if local_folder.exists() and open_run(local_folder).experiment.to_yaml(top) != asked:
                raise ConfigError(f"--with-alone: {local_folder} is a run with other settings; choose another --out")
            _run(its_twin, local_folder, f"the same command, with --out {shlex.quote(str(folder))}")
        _run(experiment, folder)


def _dry_run(experiment: Experiment) -> None:
    from polyfed.lab.analysis.cost import DryRun

    console = terminal()
    try:
        with preparation_shown(console):
            tables = DryRun.of(experiment).tables()
    except StepError as error:  # the author of a client half needs the traceback, which a run would keep
        if error.__cause__ is not None and not isinstance(error.__cause__, PolyfedError):
            typer.echo(lines("".join(traceback.format_exception(error.__cause__)), indent=""), err=True)
        raise
    console.print_tables(tables)
    typer.echo("nothing was written; the same command without --dry-run runs it")


def free_folder(folder: Path) -> Path:
    """The folder, or the first of those with a number behind its name that is not there."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in chain([folder], numbered) if not path.exists())


def _run(experiment: Experiment, folder: Path, again: str = "") -> None:
    """Run an experiment; with ``again``, the command that continues it, an existing run goes on, without a summary."""
    from polyfed.reporting.api import resume, run
    from polyfed.reporting.progress import FolderLine, WithoutSummary

    console = terminal()
    with _shown(console, folder, again) as display:
        callbacks = [FolderLine(folder, console), WithoutSummary(display) if again else display]
        if experiment.run.engine.is_deployed:
            from polyfed.deploy.launch import launch

            launch(experiment, folder, callbacks)
        elif again and folder.exists():
            resume(folder, callbacks)
        else:
            run(experiment, folder, callbacks)


def demo_command(
    out: Annotated[
        Path | None, typer.Option(help="folder of its two runs, gone on with if they are there; else runs/demo")
    ] = None,
) -> None:
    """Train a small federation on generated data, and its server alone: half a minute, no download.

    Example: polyfed demo
    """
    place = out or free_folder(Path("runs/demo"))
    federation, alone = place / "federation", place / "server-alone"
    again = f"polyfed demo --out {shlex.quote(str(place))}"
    twin = ["twin.kind=server-only", "run.output.plots=false"]
    runs = {alone: loaded(DEMO, twin), federation: loaded(DEMO)}
    for folder, experiment in runs.items():
        if folder.exists() and (name := open_run(folder).experiment.name) != experiment.name:
            raise ConfigError(f"--out: {folder} is a run of '{name}', not of the demo; choose another --out")
    for folder, experiment in runs.items():
        if not (folder / "report.html").is_file():
            _run(experiment, folder, again)
    from polyfed.reporting.progress import summary_of

    terminal().print(summary_of(federation), crop=False)
    typer.echo("  polyfed run scenes-demo\n  polyfed init --help")  # a longer run, and one's own data


def resume_command(
    run: RunArgument,
    *,
    rounds: Annotated[int | None, typer.Option(help="rounds in all, by default those that it was begun for")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Continue a run after its last complete round, also to more rounds than it was begun for.

    Examples: polyfed resume runs/scenes-demo-seed0; polyfed resume runs/scenes-fedavg-seed0 --rounds 40
    """
    from polyfed.reporting.api import resume

    # a wrong folder is refused before a display takes the terminal
    deployed = open_run(run, allow_code=allow_code).experiment.run.engine.is_deployed
    with _shown(terminal(), run) as display:
        if deployed and rounds is None:
            from polyfed.deploy.launch import relaunch

            relaunch(run, [display], allow_code=allow_code)
        else:
            resume(run, [display], rounds=rounds, allow_code=allow_code)


def watch_command(run: RunArgument) -> None:
    """Show a run that another process works on, live.

    Example: polyfed watch runs/scenes-demo-seed0
    """
    from polyfed.reporting.progress import LiveProgress
    from polyfed.runs.events import PROGRESS, follow

    folder = open_run(run).files  # a folder whose configuration was edited is refused here
    display = LiveProgress(terminal())
    with contextlib.closing(display):
        display.show()
        ended = follow(run / PROGRESS, display, run, finished=lambda: not folder.is_worked_on())
    if not ended:
        typer.echo(f"no process works on this run; continue it with: polyfed resume {run}")


def terminal() -> Terminal:
    from polyfed.reporting.terminal import Terminal

    return Terminal()


@contextlib.contextmanager
def _shown(console: Terminal, folder: Path, again: str = "") -> Iterator[Callback]:
    """Display of a run in ``folder``; an interruption prints how to go on: with ``again``, or by resuming the run."""
    from polyfed.reporting.progress import progress_for

    display = progress_for(console)
    with contextlib.closing(display):
        try:
            yield display
        except KeyboardInterrupt:
            display.close()
            hint = "nothing was written"
            if again or (folder / "run.json").is_file():
                hint = f"continue with: {again or f'polyfed resume {folder}'}"
            raise typer.Exit(fail(f"interrupted; {hint}", 130)) from None
