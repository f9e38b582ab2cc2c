"""Pages of the reference, made from the code: settings, components, commands, presets, studies, errors, API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby

import click
import typer

import polyfed
from messages import OF_ARGUMENTS, messages
from polyfed.cli import catalogue
from polyfed.cli.catalogue import preset_groups
from polyfed.cli.console import prepared
from polyfed.cli.main import app
from polyfed.lab.studies.study import Study
from study_records import STUDIES

FOR_METHODS = "polyfed.algorithms.algorithm"
"""Module of the names that methods of one's own use."""

_GROUPS = {
    "Settings of an experiment": ("ConfigError",),
    "Data": ("DataError", "CacheFullError"),
    "Runs": ("RunError",),
    "Exchange": ("ExchangeError", "StepError", "PayloadError", "RefusedError", "BudgetError"),
    "The command line": ("fail", "BadParameter", "ClickException", "UsageError"),
    "Wrong arguments": OF_ARGUMENTS,
}


def pages() -> dict[str, str]:
    """File below ``reference/`` -> its text in Markdown."""
    made: Mapping[str, Callable[[], Iterable[str]]] = {
        "settings.md": settings,
        "components.md": all_components,
        "commands.md": commands,
        "presets.md": presets,
        "study-files.md": studies,
        "errors.md": errors,
        "api.md": api,
    }
    return {name: "\n".join(lines()) + "\n" for name, lines in made.items()}


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table."""
    heads = list(heads)
    yield from ("| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |")
    for row in rows:
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |"


def code(text: str) -> str:
    """Text as inline code; nothing for nothing."""
    return f"`{text}`" if text else ""


def settings() -> Iterator[str]:
    """Every section of a configuration."""
    yield "# Settings"
    yield "\nEvery section of an experiment's YAML file, as `polyfed list settings SECTION` shows it."
    for section, meaning in catalogue.entries(catalogue.SETTINGS).items():
        yield from (f"\n## `{section}`", f"\n{meaning}.\n")
        yield from _settings_table(catalogue.SETTINGS, section)


def all_components() -> Iterator[str]:
    """Every component of every family."""
    yield "# Components"
    yield "\nComponents selected by `name` in a configuration, with their settings, as in `polyfed list KIND NAME`."
    for family, meaning in catalogue.kinds().items():
        if family in (catalogue.PRESETS, catalogue.SETTINGS):
            continue
        yield from (f"\n## {family.capitalize().replace('-', ' ')}", f"\n{meaning[0].upper()}{meaning[1:]}.")
        for name, summary in catalogue.entries(family).items():
            yield from (f"\n### `{name}`", f"\n{summary}.\n")
            yield from _settings_table(family, name)


def _settings_table(family: str, name: str) -> Iterator[str]:
    fields = catalogue.settings_of(family, name)
    if not fields:
        yield "No settings."
        return
    rows = ((code(one.name), code(one.default), one.allowed, one.description) for one in fields)
    yield from table(("key", "default", "values", "meaning"), rows)


def commands() -> Iterator[str]:
    """Every command with its arguments and options."""
    yield "# Commands"
    yield "\nOutput of `polyfed COMMAND --help`. `polyfed --install-completion` completes them in your shell."
    root = prepared(typer.main.get_command(app))
    for path, command in sorted(_leaves(root, "polyfed"), key=lambda pair: pair[0]):
        context = click.Context(command, info_name=path)
        yield f"\n## `{path}`"
        yield from (f"\n{_escaped(paragraph)}" for paragraph in (command.help or "").split("\n\n"))
        yield f"\n    {path} {' '.join(command.collect_usage_pieces(context))}\n"
        yield from table(("argument or option", "meaning"), _parameters(command, context))


def _leaves(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield path, command
    for name, child in (children or {}).items():
        yield from _leaves(child, f"{path} {name}")


def _parameters(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option):
            names, meaning = ", ".join(parameter.opts + parameter.secondary_opts), parameter.help or ""
            if not parameter.is_flag:
                names += f" {parameter.make_metavar(context)}"
        else:
            names, meaning = parameter.make_metavar(context), getattr(parameter, "help", None) or ""
        yield code(names), _escaped(meaning)


def presets() -> Iterator[str]:
    """Every preset by family, with its needs and costs."""
    yield "# Presets"
    yield "\nNamed experiments: `polyfed run NAME`. Variants stand below the preset that they extend."
    for root, members in preset_groups().items():
        yield from (f"\n## {root}\n",)
        rows = ((code(one.name), one.description, one.needs, one.cost) for one in members)
        yield from table(("preset", "description", "needs", "cost"), rows)


def studies() -> Iterator[str]:
    """Every study with its title and size."""
    yield "# Studies"
    yield "\nTables by one command: `polyfed study run FILE` ([how to write one](../how-to/write-a-study.md))."
    loaded = [(f"papers/{name}.yaml", Study.load(file)) for name, file in STUDIES.items()]
    rows = ((code(path), study.title, str(len(study.rows)), str(len(study.seeds))) for path, study in loaded)
    yield from table(("study", "title", "rows", "seeds"), rows)


def errors() -> Iterator[str]:
    """Every message that the package can raise."""
    yield "# Errors"
    yield (
        "\nEvery message of the package, found in its code. Expressions stand in ‹›. A message names the fault, "
        "the value and the valid ones; the second column describes the code around it."
    )
    every = messages()
    for title, errors_of in _GROUPS.items():
        chosen = [one for one in every if one.error in errors_of]
        if chosen:
            yield f"\n## {title}"
            for package, members in groupby(chosen, key=lambda one: one.module.partition(".")[0]):
                yield f"\n### {title}: {package}\n"
                yield from table(("message", "where"), ((_escaped(one.text), _escaped(one.purpose)) for one in members))
    unknown = {one.error for one in every} - {name for errors_of in _GROUPS.values() for name in errors_of}
    if unknown:
        raise LookupError(f"no group of the page on errors has {sorted(unknown)}")


def api() -> Iterator[str]:
    """The public API, for mkdocstrings to fill in."""
    yield "# Python API"
    yield "\n`from polyfed import ...`\n"
    for name in sorted(set(polyfed.__all__) - {"__version__"}):
        home = getattr(polyfed, name).__module__
        yield from (f"\n::: {home}.{name}", "    options:", "      show_root_full_path: false")
    yield "\n## For methods of one's own\n"
    yield f"`from {FOR_METHODS} import ...`; see [add a method](../tutorials/own-method.md).\n"
    yield from (f"\n::: {FOR_METHODS}", "    options:", "      show_root_heading: false", "      heading_level: 3")


def _escaped(text: str) -> str:
    """Markdown that shows a text as it is."""
    return re.sub(r"([*_`\[\]<>#])", r"\\\1", text)
