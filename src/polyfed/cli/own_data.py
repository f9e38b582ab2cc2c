"""``polyfed init`` and ``prepare``: a first experiment on a user's own data, and these data as Parquet files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.console import preparation_shown
from polyfed.cli.options import WeightsDir
from polyfed.core.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from polyfed.data.preparation import FolderFindings
    from polyfed.reporting.tables import TextTable
    from polyfed.runs.starter import DataKind, StarterSource

_METHOD = "method"
_MOST_SITES = 20  # named in a hint
_QUESTIONS: dict[DataKind, str] = {
    "pairs": "Folder of images with captions (Enter: none)",
    "pictures": "Folder of images with classes (Enter: none)",
    "texts": "Folder or file of texts with classes (Enter: none)",
    "sounds": "Folder of recordings with classes (Enter: none)",
    "masks": "Folder of images with masks (Enter: none)",
    "table": "Table of numbers and names with classes (Enter: none)",
}


@dataclass(frozen=True)
class LayoutOptions:
    """Layout of a folder's annotations."""

    annotations: Annotated[str | None, typer.Option(help="file with captions or labels; by default detected")] = None
    file_column: Annotated[str | None, typer.Option(help="its column of image file names")] = None
    split_column: Annotated[str | None, typer.Option(help="its column of splits")] = None
    encoding: Annotated[str | None, typer.Option(help="its encoding, such as windows-1251; by default detected")] = None
    decimal: Annotated[str | None, typer.Option(help="decimal sign, '.' or ','; by default detected")] = None


def init_command(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE|method", help="YAML file to write")] = Path("experiment.yaml"),
    name: Annotated[str, typer.Argument(metavar="NAME", help="after 'method': that of your class")] = "",
    *,
    pairs: Annotated[Path | None, typer.Option(help="folder of images with captions")] = None,
    pictures: Annotated[Path | None, typer.Option(help="folder of images with classes")] = None,
    texts: Annotated[Path | None, typer.Option(help="folder or file of texts with classes")] = None,
    sounds: Annotated[Path | None, typer.Option(help="folder of recordings (WAV) with classes")] = None,
    masks: Annotated[Path | None, typer.Option(help="folder of images with masks of pixel classes")] = None,
    table: Annotated[Path | None, typer.Option(help="CSV or Parquet of numbers and names with classes")] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="data of an institution; repeatable; NAME=KIND:PATH (KIND of pairs, pictures, ...)",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="each value of this column is an institution")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="column of classes, of a table or folder; SITE=COLUMN: of that site"),
    ] = None,
    public: Annotated[Path | None, typer.Option(help="folder of public images with captions")] = None,
    public_share: Annotated[
        float | None, typer.Option(min=0.01, max=0.9, help="share of --pairs that becomes public, instead of a folder")
    ] = None,
    method: Annotated[str | None, typer.Option(help="change_distillation, creamfl or fedavg")] = None,
    clients: Annotated[int, typer.Option(min=1, help="clients for each kind of data")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of the run")] = 10,
    layout: LayoutOptions,
    together: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN|contents", help="keep rows with equal values, such as a patient's, in one split"),
    ] = None,
    fold_labels: Annotated[
        bool | None,
        typer.Option(
            "--fold-labels/--keep-labels", help="classes that differ in case or blanks alone: one, or several"
        ),
    ] = None,
    mask_values: Annotated[
        str | None, typer.Option(metavar="YAML", help="meaning of mask values, such as 'threshold: 0'")
    ] = None,
    image_encoder: Annotated[
        str | None,
        typer.Option(metavar="NAME|FOLDER", help="pretrained image network; by default the best of --weights-dir"),
    ] = None,
    text_encoder: Annotated[
        str | None, typer.Option(metavar="NAME|FOLDER", help="pretrained text network, likewise")
    ] = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Write a first experiment on your own data, or a method of your own.

    Asks for the data if no option names them. The file has comments, and is checked before it is written. A method
    gets a folder, with an experiment, a study and tests that run.

    Examples: polyfed init; polyfed init shop.yaml --pairs photos --texts reviews.csv --public-share 0.2; polyfed
    init shop.yaml --pairs photos --public shared --weights-dir weights --image-encoder facebook/dinov2-small; polyfed
    init method Bounded
    """
    if name or str(file) == _METHOD:
        origins = {one.opts[0]: context.get_parameter_source(str(one.name)) for one in context.command.params[2:]}
        given = [option for option, origin in origins.items() if getattr(origin, "name", "") == "COMMANDLINE"]
        _write_method(file, name, given)
        return
    from polyfed.core.files import paths_from, write_atomically
    from polyfed.core.untrusted import yaml_content
    from polyfed.federation.settings import DataSettings
    from polyfed.lab.analysis.partition import held_items, planned_holdings
    from polyfed.reporting.terminal import Terminal
    from polyfed.runs import starter
    from polyfed.runs.experiment import Experiment

    if file.exists():
        raise RunError(f"'{file}' exists; name another file, or remove it")
    by_kind: dict[DataKind, Path | None] = {"pairs": pairs, "pictures": pictures, "texts": texts, "sounds": sounds}
    by_kind |= {"masks": masks, "table": table}
    paths = {purpose: path for purpose, path in by_kind.items() if path is not None} or ({} if site else _asked())
    meaning = {"together": together, "fold_labels": fold_labels, "mask_values": mask_values}
    console = Terminal()
    with preparation_shown(console):
        sources, lines = _sources(paths, site or [], by, label or [], vars(layout) | meaning)
        shared = None
        if public is not None:
            is_public = "pairs" in paths and by is None
            shared = starter.StarterSource.of("pairs", public, name="public", is_public=is_public)
            starter.require_apart(sources, shared)
    weights = DataSettings(sources={}, weights_dir=weights_dir).weights_folder
    every = [*sources, *([shared] if shared else [])]
    texts_of_all = [text for source in every for text in source.texts]
    encoders = starter.StarterEncoders.of(image_encoder, text_encoder, weights and weights.absolute(), texts_of_all)
    by_site = bool(site) or by is not None
    count = 1 if by_site else clients
    first = starter.Starter(file, sources, shared, public_share, method, count, rounds, encoders, by_site)
    first.require()
    text = first.text
    with paths_from(None, file.absolute().parent):
        experiment = Experiment.load(yaml_content(text))
    tables = held_items(planned_holdings(experiment, read=True)).tables
    write_atomically(file, text.encode())
    console.print_tables(tables)
    for source in every:
        typer.echo(f"{source.name}: {source.path}")
        _list("", [line for count in source.counts for line in count.lines()])
        _list("the first training item:", source.sample)
        _list("decisions:", source.decisions)
        is_judged = source is first.server_source or (by_site and source is not shared)
        for warning in [*(source.small if is_judged else ()), *source.warnings]:
            typer.echo(f"warning: {warning}")
        for line in encoders.languages(source.texts):
            typer.echo(line)
    _list("decisions about the experiment:", [*lines, *first.decisions()])
    for name in first.alone:
        typer.echo(
            f"warning: {name} gains nothing: no other site has data of its kind, and {first.method} averages equal "
            "networks; --public FOLDER with public pairs lets it take part"
        )
    if missing := [part for part in starter.pretrained_modalities(first.kinds) if part not in encoders.names]:
        typer.echo(starter.OFFLINE.format(" and ".join(f"{part}s" for part in missing)))
    typer.echo(f"written: {file}; next: polyfed run {first.quoted} --dry-run, and then without --dry-run")


def _write_method(first: Path, name: str, options: Sequence[str]) -> None:
    """Write a method, and print what its folder holds.

    Raises:
        ConfigError: the command is of neither form, or the name is not one.
    """
    from polyfed.runs.starter_method import COMMANDS, StarterMethod

    if str(first) != _METHOD:
        raise ConfigError(f"init {first} {name}: one file at a time; or give init method NAME")
    if not name or options:
        what = f"takes no {options[0]}" if options else "needs a name, such as init method Bounded"
        raise ConfigError(f"init method: {what}; for an experiment on your own data give init FILE.yaml")
    method = StarterMethod.of(name)
    for path in method.write(Path()):
        typer.echo(f"written: {path}")
    typer.echo(f"next:\n  cd {method.module}")
    for command, use in COMMANDS.items():
        typer.echo(f"  {command:<42}  # {use}")


def _sources(
    paths: Mapping[DataKind, Path], sites: Sequence[str], by: str | None, labels: Sequence[str], options: dict[str, Any]
) -> tuple[Sequence[StarterSource], list[str]]:
    """The data, and decisions about their sites."""
    from polyfed.runs.starter import starter_sources
    from polyfed.runs.starter_sites import named_sites, sites_of_column

    if sites:
        if paths or by is not None:
            raise ConfigError("--site cannot be combined with --pairs, --table or --by; leave them out")
        return named_sites(sites, labels, options), []
    if len(labels) > 1:
        raise ConfigError(f"--label is given {len(labels)} times; give it once")
    label = labels[0] if labels else None
    if by is not None:
        return sites_of_column(paths, by, label, options)
    try:
        return starter_sources(paths, {**options, "label": label}), []
    except DataError as error:
        folders = [] if len(paths) != 1 else sorted(filter(Path.is_dir, next(iter(paths.values())).glob("[!.]*")))
        if not 2 <= len(folders) <= _MOST_SITES:
            raise
        each = " ".join(f"--site {shlex.quote(f'{folder.name}={folder}')}" for folder in folders)
        remedy = f"if each folder in it belongs to an institution, give {each}"
        raise DataError(f"{error}; {remedy}") from error


def _list(title: str, lines: Sequence[str]) -> None:
    """Print lines below a title, if there are any."""
    if lines:
        typer.echo("\n  ".join(filter(None, [title, *lines])) if title else "\n".join(f"  {line}" for line in lines))


def _asked() -> dict[DataKind, Path]:
    if not sys.stdin.isatty():
        return {}
    answers = {one: typer.prompt(words, default="", show_default=False) for one, words in _QUESTIONS.items()}
    return {one: Path(answer) for one, answer in answers.items() if answer}


_SHOWN = 5  # of each list of faults; report.json has all


def prepare_command(
    source: Annotated[Path, typer.Argument(metavar="FOLDER|FILE", help="images, captions, labels or texts")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="new folder for Parquet files")],
    *,
    layout: LayoutOptions,
    validation: Annotated[float, typer.Option(help="share drawn for validation, where data have no splits")] = 0.1,
    test: Annotated[float, typer.Option(help="share drawn for test, where data have no splits")] = 0.1,
    drop_duplicates: Annotated[
        bool, typer.Option("--drop-duplicates", help="leave items of validation or test out of train")
    ] = False,
) -> None:
    """Write a folder of data as Parquet, and report its faults.

    Examples: polyfed prepare photos my-data/photos; polyfed prepare reviews.csv my-data/reviews --split-column fold
    """
    from polyfed.core.errors import DataError
    from polyfed.core.settings import parse_settings
    from polyfed.data.preparation import REPORT, prepare_folder
    from polyfed.data.sources.folder import Folder
    from polyfed.reporting.terminal import Terminal
    from polyfed.runs.starter import small_splits

    console = Terminal()
    settings = dict(vars(layout))
    settings |= {
        "path": str(source.absolute()),
        "reading": {key: settings.pop(key) for key in ("encoding", "decimal")},
        "fractions": {"validation": validation, "test": test},
        "incomplete": "leave_out",
    }
    folder = parse_settings(Folder, settings)
    with preparation_shown(console):
        findings = prepare_folder(folder, destination, drop_duplicates=drop_duplicates)
    console.print_tables(_tables(findings, destination / REPORT))
    typer.echo("\n  ".join(["the first training item:", *findings.sample]))
    try:
        for warning in small_splits(destination.absolute(), findings.roles):
            typer.echo(f"warning: {warning}")
    except DataError as error:  # all is written, and fit for another purpose
        typer.echo(f"warning: {error}")
    typer.echo("as a source of an experiment, below `data.sources`:")
    identity = ", id: file_name" if findings.roles.image else ""
    typer.echo(
        f"  {destination.name}: {{name: parquet, path: {destination.name}{identity}, {findings.roles.settings}}}"
    )
    if findings.roles.mask:
        typer.echo(f"with a task {{name: segmentation, target: {findings.roles.mask}}} and settings of its classes")
    typer.echo(f"run it with --data-dir {destination.parent}; or let polyfed init write the experiment")


def _faults(findings: FolderFindings) -> dict[str, Sequence[str]]:
    """Faults of the data, each with its occurrences."""
    from polyfed.data.files import SPLIT_NAMES

    return {
        "images that cannot be read, left out": [f"{file}: {reason}" for file, reason in findings.broken.items()],
        "rows, or files of captions, without an image, left out": findings.without_image,
        "images with values of more than 8 bits, scaled": _numbers("from {}", findings.scaled),
        "splits that lack classes": findings.absent,
        "splits without an item": [split for split in SPLIT_NAMES if split not in findings.items],
        "the same in two splits": [f"{first} = {second}" for first, second in findings.in_two_splits],
        "columns with empty values, and number of items": _numbers("{}", findings.lacking),
        "images without a row or captions, left out": findings.unused,
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
