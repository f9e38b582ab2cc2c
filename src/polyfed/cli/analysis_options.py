"""What the commands of ``polyfed analyse`` share: options, and what they print and write at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.core.errors import RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyfed.reporting.tables import TextTable

OutOfExperiment = Annotated[
    Path | None, typer.Option("--out", help="folder; by default runs/studies/<name>-<analysis>")
]
OutOfRun = Annotated[Path | None, typer.Option("--out", help="folder; by default RUN/analysis")]
LastOrBest = Annotated[
    str, typer.Option("--model", help="the server's final model (last), its best, or that of a round")
]
MapMethod = Annotated[str, typer.Option("--method", help="of the map: tsne or pca")]


def analysis_folder(out: Path | None, run: Path) -> Path:
    """Where the results of an analysis of a run go, made before the work begins."""
    from polyfed.lab.analysis.results import ready_folder

    return ready_folder(out or run / "analysis")


def show_analysis(
    folder: Path,
    name: str,
    content: dict[str, Any],
    drawing: Figure | None,
    tables: Sequence[TextTable],
    csv: str | None = None,
) -> None:
    """Print the tables and write ``<name>.json``, ``<name>.csv`` and ``<name>.png``, the latter two where given.

    Raises:
        RunError: the folder cannot be written to.
    """
    from polyfed.core.files import write_atomically
    from polyfed.lab.analysis.results import write_json
    from polyfed.reporting.figures import save
    from polyfed.reporting.terminal import Terminal

    Terminal().print_tables(tables)  # first: what was computed for hours is seen even if the disk is full
    paths = [write_json(folder / f"{name}.json", content)]
    try:
        if csv is not None:
            paths.append(folder / f"{name}.csv")
            write_atomically(paths[-1], csv.encode())
        if drawing is not None:
            paths.append(save(drawing, folder / f"{name}.png"))
    except OSError as error:
        raise RunError(f"cannot write to '{folder}' ({error.strerror or error}); choose another --out") from error
    for path in paths:
        typer.echo(f"written: {path}")
