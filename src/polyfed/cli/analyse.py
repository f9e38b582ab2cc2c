"""``polyfed analyse``: questions to runs and experiments; parses, calls, prints."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from polyfed.cli.options import (
    EXPERIMENT,
    ExperimentArgument,
    ExperimentOptions,
    PlaceOptions,
    RunArgument,
    RunArguments,
    command_group,
    names_in,
    numbers_in,
)
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.questions import QUESTIONS, Question
from polyfed.runs.opened import open_run

if TYPE_CHECKING:
    from polyfed.lab.analysis.results import AnalysisResult

OutOfExperiment = Annotated[Path | None, typer.Option("--out", help="folder; by default runs/<name>-<analysis>")]
OutOfRun = Annotated[Path | None, typer.Option("--out", help="folder; by default RUN/analysis")]


def show_result(result: AnalysisResult, folder: Path, name: str) -> None:
    """Print the tables, then write the files: what was computed for hours is seen even if the disk is full.

    Raises:
        RunError: the folder cannot be written to.
    """
    from polyfed.reporting.terminal import Terminal

    Terminal().print_tables(result.tables)
    for path in result.save(folder, name):
        typer.echo(f"written: {path}")


# ---- questions to runs, each a command with the question's options

_LISTS: dict[Any, Callable[[str, str], list[Any]]] = {list[str]: names_in, list[int]: numbers_in}


def _command(question: Question) -> Callable[..., None]:
    several = question.takes_several

    def command(out: Path | None, places: PlaceOptions, **given: Any) -> None:
        from polyfed.lab.analysis.results import ready_folder

        folders = given.pop("runs") if several else [given.pop("run")]
        options = {name: _value(question, name, value) for name, value in given.items()}
        runs = [places.open(folder) for folder in folders]
        folder = ready_folder(out or folders[0] / "analysis")
        show_result(question.of(runs, options), folder, question.stem(options))
        if question.is_reported and out is None:
            _report(runs[0])

    kind = inspect.Parameter.KEYWORD_ONLY
    run = inspect.Parameter("runs", kind, annotation=RunArguments)
    parameters = [run if several else run.replace(name="run", annotation=RunArgument)]
    parameters += [option.replace(annotation=_typer_type(option)) for option in question.options.values()]
    parameters += [inspect.Parameter("out", kind, annotation=OutOfRun, default=None)]
    parameters += [inspect.Parameter("places", kind, annotation=PlaceOptions)]
    command.__name__, command.__doc__ = f"analyse_{question.name}", question.ask.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _typer_type(option: inspect.Parameter) -> Any:
    """The option as typer takes it; lists are texts with commas."""
    kind, field = get_args(option.annotation)
    listed, kind = _list_type(kind), str | None if str in get_args(kind) else kind
    least = next((rule.ge for rule in field.metadata if hasattr(rule, "ge")), None)
    name = f"--{field.title or option.name}"
    how = {"metavar": "A,B,..." if listed == list[str] else "N,N,..."} if listed else {"min": least}
    return Annotated[str | None if listed else kind, typer.Option(name, help=field.description, **how)]


def _value(question: Question, name: str, given: Any) -> Any:
    listed = _list_type(get_args(question.options[name].annotation)[0])
    return _LISTS[listed](f"--{name}", given) if listed and given is not None else given


def _list_type(kind: Any) -> Any:
    return next((each for each in get_args(kind) if each in _LISTS), None)


def _report(run: Any) -> None:
    """The run's own reports show it from now on."""
    from polyfed.reporting.page import write_html_report, write_report

    typer.echo(f"written: {write_report(run.records)}")
    typer.echo(f"written: {write_html_report(run.records)}")


# ---- questions to experiments that nobody has run


def analyse_cost(
    source: ExperimentArgument,
    *,
    number: Annotated[int, typer.Option("--round", min=1, help="which round; those before are run too")] = 1,
    settings: ExperimentOptions,
    out: OutOfExperiment = None,
) -> None:
    """Measure a round of one client of each kind: operations, parameters, memory, seconds and bytes."""
    from polyfed.lab.analysis.cost import round_costs
    from polyfed.lab.analysis.results import ready_folder

    experiment = settings.load(source)
    folder = ready_folder(out or Path("runs") / f"{experiment.name}-cost")
    show_result(round_costs(experiment, number).result(), folder, "cost")


def analyse_partition(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE|RUN", help=f"{EXPERIMENT}, or folder of a run")],
    settings: ExperimentOptions,
    out: OutOfExperiment = None,
) -> None:
    """Count what every client holds, by class and column, and draw it; nothing is trained."""
    from polyfed.lab.analysis.partitions import held_items, planned_holdings
    from polyfed.lab.analysis.results import ready_folder

    if Path(source).is_dir():
        if settings.overrides:
            wrong = settings.overrides[0]
            raise ConfigError(f"--set {wrong}: '{source}' is a run that is over; give its config.yaml instead")
        records, folder = open_run(source).records, out or Path(source) / "analysis"
    else:
        experiment = settings.load(source)
        records, folder = planned_holdings(experiment), out or Path("runs") / f"{experiment.name}-partition"
    show_result(held_items(records), ready_folder(folder), "partition")


analyse_app = command_group(
    "analyse_",
    (*map(_command, QUESTIONS.values()), analyse_cost, analyse_partition),
    "Say what a model is like inside, what crossed, what it costs and what a run gave away.",
)
