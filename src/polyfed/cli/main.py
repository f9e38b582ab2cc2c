"""The command line: parses, calls the API, prints."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from polyfed.cli import results, running
from polyfed.cli.analyse import analyse_command, downstream_command
from polyfed.cli.catalogue import list_command
from polyfed.cli.console import fail, prepared, warnings_and_signals
from polyfed.cli.deploy import deploy_app
from polyfed.cli.options import with_shared_options
from polyfed.cli.own_data import init_command, prepare_command
from polyfed.cli.study import study_app
from polyfed.core.errors import PolyfedError
from polyfed.core.extras import extra_with, how_to_install
from polyfed.core.files import private_files
from polyfed.core.version import __version__

# of click, or of the click that newer typers carry within
_CommandError: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
_NoArguments: Any = sys.modules[_CommandError.__module__].NoArgsIsHelpError
_TWICE = re.compile(r"( Did you mean [^?]*\?)\1+")

# read when these libraries are first imported, which is later: torch and transformers take seconds
_QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
_COMMANDS: Mapping[str, Mapping[str, Callable[..., None] | typer.Typer]] = {
    "To begin": {
        "demo": running.demo_command,
        "run": running.run_command,
        "list": list_command,
        "init": init_command,
        "prepare": prepare_command,
        "doctor": results.doctor_command,
    },
    "A run": {
        "resume": running.resume_command,
        "watch": running.watch_command,
        "report": results.report_command,
        "gallery": results.gallery_command,
        "evaluate": results.evaluate_command,
        "downstream": downstream_command,
        "analyse": analyse_command,
        "export": results.export_command,
    },
    "Many runs, many sites": {"compare": results.compare_command, "study": study_app, "deploy": deploy_app},
}

# commands import what they need when they run: --help and completion answer at once
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Multimodal federated learning: image, text and image-text clients train without sharing data.",
)
for _panel, _commands in _COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(with_shared_options(_command))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, 2 for errors that the user can correct, 130 for an interruption."""
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    with private_files(), warnings_and_signals():
        try:
            command = prepared(typer.main.get_command(app))
            return int(command(arguments, prog_name="polyfed", standalone_mode=False) or 0)
        except _NoArguments as error:
            typer.echo(error.format_message(), nl=False)  # the help, unless rich has printed it
            return fail(f"error: '{error.ctx.command_path}' needs one of these commands", error.exit_code)
        except _CommandError as error:
            message = _TWICE.sub(r"\1", error.format_message())  # by click, and by typer
            return fail(f"error: {message}", error.exit_code)
        except typer.Abort:
            return fail("interrupted", 130)
        except PolyfedError as error:
            return fail(f"error: {error}", 2)
        except ModuleNotFoundError as error:
            extra = extra_with(error.name or "")
            if extra is None:
                raise
            remedy = how_to_install(extra)
            return fail(f"error: this needs the package '{error.name}', which is not installed; {remedy}", 2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polyfed {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print it")] = False,
) -> None:
    """Options of the program itself."""
