"""``polyfed report``, ``evaluate``, ``compare`` and ``export``, which take finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from polyfed.cli import options
from polyfed.runs.opened import open_run


def doctor_command() -> None:
    """Check this machine for problems that would stop a run.

    Exit code 1 if something does.
    """
    from polyfed.runs.environment import observation_lines, observations

    observed = list(observations(Path("runs")))
    for line in observation_lines(observed):
        typer.echo(line)
    if any(item.remedy for item in observed):
        raise typer.Exit(1)


def report_command(
    run: options.RunArgument, out: Annotated[Path | None, typer.Option(help="file; by default RUN/report.html")] = None
) -> None:
    """Write the report of a run, finished or not, as one HTML file without samples of the data."""
    from polyfed.reporting.page import write_html_report

    typer.echo(f"written: {write_html_report(open_run(run).records, out)}")


def gallery_command(
    run: options.RunArgument,
    *,
    out: Annotated[Path | None, typer.Option(help="file; by default RUN/gallery.html")] = None,
    queries: Annotated[int, typer.Option(min=1, help="of each kind")] = 6,
    opening: options.PlaceOptions,
) -> None:
    """Write a page of what server and clients retrieve, before and after; it shows local data and is to stay local.

    Example: polyfed gallery runs/shop-seed0 --queries 10
    """
    from polyfed.reporting.gallery import write_gallery

    path = write_gallery(opening.open(run), out, queries=queries)
    typer.echo(f"written: {path} (images and texts of the data are in it: keep it where they may be)")


def evaluate_command(
    run: options.RunArgument,
    *,
    data: Annotated[str, typer.Option(help="a source of the run, or a folder of Parquet files")],
    split: Annotated[str, typer.Option(help="split of it")] = "test",
    which: options.BestOrLast = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="MODALITY=COLUMN", help="column of a Parquet folder")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(metavar="TARGET=COLUMN", help="column with labels of a Parquet folder")
    ] = None,
    opening: options.PlaceOptions,
    as_json: options.AsJson = False,
) -> None:
    """Measure a run's model on any data set.

    Examples: polyfed evaluate runs/shop-seed0 --data shop --split validation; polyfed evaluate runs/shop-seed0
    --data other-shop --data-dir my-data --column text=title
    """
    from polyfed.reporting.run_tables import evaluation_tables
    from polyfed.reporting.terminal import Terminal
    from polyfed.runs.evaluation import Target, evaluate_model

    samples = Target(
        data, split, columns=options.pairs_in("--column", column), targets=options.pairs_in("--target", target)
    )
    evaluation = evaluate_model(opening.open(run), samples, which=which)
    if as_json:
        typer.echo(json.dumps({"run": str(run), **vars(evaluation)}, indent=1))
    else:
        Terminal().print_tables(evaluation_tables(evaluation))


def compare_command(
    runs: options.RunArguments,
    metric: Annotated[str | None, typer.Option(help="by default r1_sum or accuracy")] = None,
    kind: Annotated[str, typer.Option(help="test or validation")] = "test",
    against: Annotated[
        str | None, typer.Option(metavar="NAME", help="run that paired differences are against; by default the first")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw curves into this PNG")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare runs, seed by seed.

    Those that differ only by their seed are taken together, and paired by it with others.

    Examples: polyfed compare runs/shop-* --metric accuracy --plot comparison.png; polyfed compare
    runs/shop-server-only-seed* runs/shop-seed*
    """
    from polyfed.reporting.api import compare
    from polyfed.reporting.terminal import Terminal

    compared = compare(runs, metric=metric, split=kind, against=against)
    if as_json:
        typer.echo(json.dumps(compared.to_json(), indent=1))
    else:
        Terminal().print_tables(compared.tables)
    if plot is not None:
        typer.echo(f"drawn: {compared.save(plot)}", err=as_json)


def export_command(
    run: options.RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="new folder; by default RUN/export, hugging-face or adapters")
    ] = None,
    which: options.BestOrLast = None,
    weights_dir: options.WeightsDir = None,
    form: Annotated[
        Literal["torch", "huggingface", "peft"],
        typer.Option("--format", help="programs and run.py; a folder for AutoModel, with a card; or adapters for peft"),
    ] = "torch",
    allow_code: options.AllowCode = False,
) -> None:
    """Export a run's model for use without polyfed, its pretrained networks and tokenizers included.

    Examples: polyfed export runs/shop-seed0 --out shop-model; polyfed export runs/shop-seed0 --format huggingface
    """
    from polyfed.export.cards import usage
    from polyfed.export.model import export_adapters, export_hugging_face, export_model

    opened = open_run(run, weights_dir=weights_dir, allow_code=allow_code)
    export = {"torch": export_model, "huggingface": export_hugging_face, "peft": export_adapters}[form]
    path = export(opened, out, which=which)
    typer.echo("\n".join([f"exported and checked: {path}", *usage(path, form)]))
