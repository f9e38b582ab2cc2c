"""What several commands of the command line share: options, and how their values are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyfed.core.errors import ConfigError
from polyfed.runs.presets import preset_names

EXPERIMENT = "name of a preset (polyfed list presets), or a YAML file"

ExperimentArgument = Annotated[
    str,
    typer.Argument(metavar="PRESET|FILE", help=EXPERIMENT, show_default=False, autocompletion=lambda: preset_names()),
]
DataDir = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="folder of data sets; else POLYFED_DATA", show_default=False),
]
WeightsDir = Annotated[
    Path | None,
    typer.Option(
        exists=True, file_okay=False, help="folder of pretrained weights; else POLYFED_WEIGHTS", show_default=False
    ),
]
BestOrLast = Annotated[
    str | None, typer.Option("--model", help="best or last; by default best if there is one", show_default=False)
]
Device = Annotated[str | None, typer.Option(help="by default the run's", show_default=False)]


def names_in(option: str, text: str, separator: str = ",") -> list[str]:
    """The names in an option's value.

    Raises:
        ConfigError: one is empty.
    """
    names = [name.strip() for name in text.split(separator)]
    if not all(names):
        raise ConfigError(f"{option} {text}: has an empty name; give names with '{separator}' between them")
    return names


def pairs_in(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Name -> column, as the repeated option gives them.

    Raises:
        ConfigError: one has not the form NAME=COLUMN.
    """
    pairs = [text.partition("=") for text in texts or ()]
    for name, sign, value in pairs:
        if not (name and sign and value):
            raise ConfigError(f"{option} {name}{sign}{value}: needs the form NAME=COLUMN")
    return {name: value for name, _, value in pairs}


def numbers_in(option: str, text: str) -> list[int]:
    """The whole numbers in an option's value.

    Raises:
        ConfigError: something else is among them.
    """
    digits = names_in(option, text)
    wrong = [name for name in digits if not name.isdecimal()]
    if wrong:
        raise ConfigError(f"{option} {text}: '{wrong[0]}' is no whole number from 0 on; give such as 0,1,2")
    return [int(name) for name in digits]
