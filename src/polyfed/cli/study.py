"""``polyfed study``: many runs that make a table; parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.console import fail, interruptible
from polyfed.cli.options import AllowCode, AsJson, DataDir, WeightsDir, command_group, names_in

PAPERS = Path("papers")
_CLONED = Path(__file__).parents[3] / PAPERS

_SHOWN = 5

StudyArgument = Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of a study (polyfed study list)")]
StudyFolder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER|NAME|FILE",
        help="folder that polyfed study run printed, its name in runs/studies, with or without the scale, or the "
        "study's file",
    ),
]


def study_run(
    source: StudyArgument,
    *,
    scale: Annotated[
        str, typer.Option(help="small, paper, smoke (a test of all parts), or one of the file's own")
    ] = "small",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="number of seeds, from 0 on; by default that of the study")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="cells at once", show_default="one per GPU, else one per core")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="engine of the clients of each cell: local or ray")] = None,
    only: Annotated[str | None, typer.Option(metavar="ROW,ROW,...", help="these rows", show_default="all")] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="HOURS", help="run the most important cells first, for so long")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder; by default runs/studies/<name>-<scale>")] = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Run missing cells of a study, and print its tables. Continues where it was stopped.

    Examples: polyfed study run mine.yaml --only fedavg,mine --budget 1.5; in a clone of polyfed's repository, polyfed
    study run papers/creamfl/t1.yaml --data-dir data --jobs 2
    """
    from polyfed.lab.studies.cells import Places
    from polyfed.lab.studies.opened import STUDIES
    from polyfed.lab.studies.runner import run_study, study_display
    from polyfed.lab.studies.study import Study
    from polyfed.lab.studies.study_files import study_name
    from polyfed.lab.studies.tables import study_tables
    from polyfed.reporting.terminal import Terminal

    study = Study.load(source, scale)
    if seeds is not None:
        study = study.with_seeds(range(seeds))
    with interruptible("the same command goes on"), study_display(Terminal()) as display:
        run = run_study(
            study,
            out or STUDIES / f"{study_name(source)}-{scale}",
            places=Places(data_dir, weights_dir, engine),
            only=None if only is None else names_in("--only", only),
            jobs=jobs,
            budget=None if budget is None else budget * 3600,
            listener=display,
        )
    Terminal().print_tables(study_tables(run.results))
    typer.echo(f"study: {run.folder}")
    ended, missing = run.ended, run.ended.missing
    if missing:
        shown = "; ".join(missing[:_SHOWN]) + ("; ..." if len(missing) > _SHOWN else "")
        typer.echo(f"not run: {len(missing)} cells ({shown})", err=True)
    if ended.stopped:
        raise typer.Exit(fail(f"stopped: {ended.stopped}", 1))
    if ended.failures:
        raise typer.Exit(fail(f"{len(ended.failures)} cells failed; the same command tries them again", 1))


def study_list(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="by default papers/ here, else in the clone that is installed"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the study files below a folder."""
    import json
    import os

    from polyfed.lab.studies.study_files import study_content, study_files

    chosen = folder or (PAPERS if PAPERS.is_dir() or not _CLONED.is_dir() else _CLONED)
    titles = {os.path.relpath(path): str(study_content(path).get("title", "")) for path in study_files(chosen).values()}
    if as_json:
        typer.echo(json.dumps(titles, indent=1))
        return
    width = max(map(len, titles), default=0)
    for path, title in titles.items():
        typer.echo(f"{path.ljust(width)}  {title}")


def study_show(folder: StudyFolder, allow_code: AllowCode = False) -> None:
    """Print the tables of a study, also of one that another process works on."""
    from polyfed.lab.studies.opened import open_study
    from polyfed.lab.studies.tables import study_tables
    from polyfed.reporting.terminal import Terminal

    Terminal().print_tables(study_tables(open_study(folder, allow_code=allow_code).results))


def study_export(
    folder: StudyFolder,
    *,
    formats: Annotated[
        str, typer.Option("--format", metavar="FORMAT,FORMAT,...", help="these of markdown, csv, latex, png and svg")
    ] = "markdown,csv,latex,png,svg",
    out: Annotated[Path | None, typer.Option(help="folder; by default FOLDER/export")] = None,
    allow_code: AllowCode = False,
) -> None:
    """Write tables and figures of a study: Markdown, CSV of means and of seeds, LaTeX (booktabs), PNG, SVG."""
    from polyfed.lab.studies.exports import export_study
    from polyfed.lab.studies.opened import open_study

    study = open_study(folder, allow_code=allow_code)
    for path in export_study(study.results, out or study.folder / "export", names_in("--format", formats)):
        typer.echo(f"written: {path}")


study_app = command_group(
    "study_", (study_run, study_list, study_show, study_export), "Make a table or a figure of many runs."
)
