"""``polyfed init``: parses or asks, calls, prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyfed.cli.options import WeightsDir
from polyfed.core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from polyfed.runs.starter import DataKind

_QUESTIONS: dict[DataKind, str] = {
    "pairs": "Folder of pictures with captions (Enter: none)",
    "pictures": "Folder of pictures with classes (Enter: none)",
    "texts": "Folder or file of texts with classes (Enter: none)",
}


def init_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file to be written")] = Path("experiment.yaml"),
    *,
    pairs: Annotated[Path | None, typer.Option(help="folder of pictures with captions")] = None,
    pictures: Annotated[Path | None, typer.Option(help="folder of pictures with classes")] = None,
    texts: Annotated[Path | None, typer.Option(help="folder or file of texts with classes")] = None,
    method: Annotated[str | None, typer.Option(help="change_distillation, creamfl or fedavg")] = None,
    clients: Annotated[int, typer.Option(min=1, help="of each kind of data")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="of the run")] = 10,
    annotations: Annotated[str | None, typer.Option(help="of a folder: file with captions or labels")] = None,
    file_column: Annotated[str | None, typer.Option(help="of that file: column of pictures' file names")] = None,
    split_column: Annotated[str | None, typer.Option(help="of that file: column that says the split")] = None,
    image_encoder: Annotated[
        str | None,
        typer.Option(metavar="NAME|FOLDER", help="pretrained network of pictures; else the best of --weights-dir"),
    ] = None,
    text_encoder: Annotated[
        str | None, typer.Option(metavar="NAME|FOLDER", help="pretrained network of texts, likewise")
    ] = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Write a first experiment on your own data.

    Asks for the data if no option names them. The file has comments; what it says is checked before it is written.

    Examples: polyfed init; polyfed init shop.yaml --pairs photos --texts reviews.csv --clients 4; polyfed
    init shop.yaml --pairs photos --weights-dir weights --image-encoder facebook/dinov2-small
    """
    from polyfed.core.files import write_atomically
    from polyfed.federation.settings import DataSettings
    from polyfed.lab.analysis.partition import held_items, planned_holdings
    from polyfed.reporting.terminal import Terminal
    from polyfed.runs.config_files import read_config
    from polyfed.runs.experiment import Experiment
    from polyfed.runs.starter import OFFLINE, StarterEncoders, modalities_of, starter_sources, starter_text

    if file.exists():
        raise RunError(f"'{file}' is there already; name another file, or remove it")
    given: dict[DataKind, Path | None] = {"pairs": pairs, "pictures": pictures, "texts": texts}
    paths = {kind: path for kind, path in given.items() if path is not None} or _asked()
    told = {"annotations": annotations, "file_column": file_column, "split_column": split_column}
    sources = starter_sources(paths, told)
    weights = DataSettings(sources={}, weights_dir=weights_dir).weights_folder
    encoders = StarterEncoders.of(image_encoder, text_encoder, weights and weights.absolute())
    text = starter_text(file.stem, str(file), sources, method=method, clients=clients, rounds=rounds, encoders=encoders)
    write_atomically(file, text.encode())
    try:
        tables = held_items(planned_holdings(Experiment.parse(read_config(file)))).tables
    except BaseException:
        file.unlink()
        raise
    Terminal().print_tables(tables)
    for source in sources:
        typer.echo("\n  ".join([f"the first training item of {source.kind}:", *source.sample]))
        for warning in [
            *(source.warnings if source is sources[0] else ()),
            *source.told_of,
            *encoders.languages(source.texts),
        ]:
            typer.echo(f"warning: {warning}")
    if missing := encoders.missing(modalities_of(paths)):
        typer.echo(OFFLINE.format(" and ".join(f"{part}s" for part in missing)))
    typer.echo(f"written: {file}; next: polyfed run {file} --dry-run, and then without --dry-run")


def _asked() -> dict[DataKind, Path]:
    if not sys.stdin.isatty():
        raise ConfigError("there are no data; give --pairs, --pictures or --texts")
    answers = {kind: typer.prompt(words, default="", show_default=False) for kind, words in _QUESTIONS.items()}
    return {kind: Path(answer) for kind, answer in answers.items() if answer}
