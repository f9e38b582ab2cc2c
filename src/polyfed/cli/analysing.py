"""What the commands of ``polyfed analyse`` share: options, and what they print and write at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from polyfed.cli.options import ExperimentArgument

if TYPE_CHECKING:
    from polyfed.reporting.tables import TextTable
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.opened import ServerModel

Source = ExperimentArgument
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="override a setting, such as run.rounds=5", show_default=False),
]
Seeds = Annotated[str, typer.Option(metavar="N,N,...", help="every experiment is run with each of these seeds")]
Folder = Annotated[
    Path | None, typer.Option("--out", help="folder; by default runs/<name>-<analysis>", show_default=False)
]
Place = Annotated[Path | None, typer.Option("--out", help="folder; by default RUN/analysis", show_default=False)]
Which = Annotated[str, typer.Option("--model", help="the server's final model (last), or its best")]
Projection = Annotated[str, typer.Option("--method", help="of the map: tsne or pca")]


def analysed(
    source: str, overrides: Sequence[str] | None, data_dir: Path | None, weights_dir: Path | None
) -> Experiment:
    """The experiment that a command is given, with overrides and folders."""
    from polyfed.runs.experiment import Experiment

    folders = {"data.dir": data_dir, "data.weights_dir": weights_dir}
    given = [f"{key}={json.dumps(str(path.resolve()))}" for key, path in folders.items() if path is not None]
    return Experiment.load(source, [*(overrides or []), *given])


class Places(TypedDict):
    """Where data, pretrained weights and models are, if not where a run had them."""

    data_dir: Path | None
    weights_dir: Path | None
    device: str | None


def server_model(run: Path, which: str, places: Places) -> ServerModel:
    """The server's model of a run."""
    from polyfed.runs.opened import open_run

    server = open_run(run, **places).server_model(which)
    server.warn_if_untrained()
    return server


@contextlib.contextmanager
def continuable() -> Iterator[None]:
    """A command that goes on where it was interrupted, started again."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; continue with the same command", err=True)
        raise typer.Exit(130) from None


def show_analysis(folder: Path, name: str, content: dict[str, Any], drawing: Any, tables: Sequence[TextTable]) -> None:
    """Write ``<name>.json`` and ``<name>.png`` and print the tables."""
    from polyfed.analysis.results import write_json
    from polyfed.reporting.figures import save
    from polyfed.reporting.terminal import Terminal

    paths = [write_json(folder / f"{name}.json", content)]
    if drawing is not None:
        paths.append(save(drawing, folder / f"{name}.png"))
    console = Terminal()
    for table in tables:
        console.print(table.rich())
    for path in paths:
        typer.echo(f"written: {path}")
