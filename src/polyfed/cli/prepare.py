"""``polyfed prepare``: parses, calls, prints."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.console import interruptible

if TYPE_CHECKING:
    from polyfed.data.preparation import FolderFindings
    from polyfed.reporting.tables import TextTable

_SHOWN = 5  # of each list of faults; all are in report.json


def prepare_command(
    source: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="pictures, captions, labels or texts")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="folder to be made, for Parquet files")],
    *,
    annotations: Annotated[str | None, typer.Option(help="file with captions or labels, if not found by name")] = None,
    file_column: Annotated[str | None, typer.Option(help="its column of pictures' file names")] = None,
    split_column: Annotated[str | None, typer.Option(help="column that says the split")] = None,
    validation: Annotated[float, typer.Option(help="share drawn for validation, where nothing tells splits")] = 0.1,
    test: Annotated[float, typer.Option(help="share drawn for test, where nothing tells splits")] = 0.1,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="leave out of train what validation or test has too")
    ] = False,
) -> None:
    """Write a folder of data as Parquet, and report its faults.

    Examples: polyfed prepare photos my-data/photos; polyfed prepare reviews.csv my-data/reviews --split-column fold
    """
    from polyfed.core.activity import heard_by
    from polyfed.core.errors import DataError
    from polyfed.core.settings import parse_settings
    from polyfed.data.preparation import REPORT, prepare_folder
    from polyfed.data.sources.folder import Folder
    from polyfed.reporting.progress import progress_for
    from polyfed.reporting.terminal import Terminal
    from polyfed.runs.events import Callbacks
    from polyfed.runs.starter import small_splits

    console = Terminal()
    settings: dict[str, Any] = {
        "path": str(source.absolute()),
        "annotations": annotations,
        "file_column": file_column,
        "split_column": split_column,
        "fractions": {"validation": validation, "test": test},
        "incomplete": "leave_out",
    }
    folder = parse_settings(Folder, settings)
    with (
        interruptible("nothing was written"),
        contextlib.closing(Callbacks([progress_for(console)])) as display,
        heard_by(display),
    ):
        findings = prepare_folder(folder, destination, drop_duplicates=drop_duplicates)
    console.print_tables(_tables(findings, destination / REPORT))
    typer.echo("\n  ".join(["the first training item:", *findings.sample]))
    try:
        for warning in small_splits(destination.absolute(), findings.roles):
            typer.echo(f"warning: {warning}")
    except DataError as error:  # all is written, and fit for another purpose
        typer.echo(f"warning: {error}")
    typer.echo("as a source of an experiment, below `data.sources`:")
    typer.echo(
        f"  {destination.name}: {{name: parquet, path: {destination.name}{_id(findings)}, {findings.roles.settings}}}"
    )
    typer.echo(f"run it with --data-dir {destination.parent}; or let polyfed init write the experiment")


def _id(findings: FolderFindings) -> str:
    return ", id: file_name" if findings.roles.image else ""


def _faults(findings: FolderFindings) -> dict[str, Sequence[str]]:
    """What is wrong with the data -> where."""
    from polyfed.data.files import SPLIT_NAMES

    return {
        "pictures that cannot be read, left out": [f"{file}: {reason}" for file, reason in findings.broken.items()],
        "rows whose pictures are not there, left out": findings.without_picture,
        "pictures whose values are not of 8 bits, scaled": _numbers("from {}", findings.scaled),
        "splits that lack classes": findings.absent,
        "splits without an item": [split for split in SPLIT_NAMES if split not in findings.items],
        "the same in two splits": [f"{first} = {second}" for first, second in findings.in_two_splits],
        "columns with nothing in them, and of how many items": _numbers("{}", findings.lacking),
        "pictures that no row names": findings.unused,
        "files that are not read, by ending": _numbers("{}", findings.unread),
    }


def _numbers(form: str, counts: Mapping[str, int]) -> list[str]:
    return [f"{form.format(what)}: {number:,}" for what, number in counts.items()]


def _tables(findings: FolderFindings, report: Path) -> list[TextTable]:
    from polyfed.reporting.tables import TextTable, count

    faults = _faults(findings)
    rows = [(what, count(len(entries)), "; ".join(entries[:_SHOWN])) for what, entries in faults.items() if entries]
    if findings.repeated:
        rows.append(("repeated within a split", count(findings.repeated), ""))
    items = [(split, count(number)) for split, number in reversed(findings.items.items())]
    return [
        TextTable(f"{sum(findings.items.values()):,} items", ("split", "items"), items),
        TextTable(
            "To look at" if rows else "Nothing to look at", ("", "how many", "the first"), rows, [f"All: {report}"]
        ),
    ]
