"""What ``polyfed list`` shows: a screen of all there is, the members of a kind, or the settings of one."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from polyfed.cli import catalogue
from polyfed.cli.catalogue import PRESETS, PresetFacts, preset_facts, preset_groups
from polyfed.cli.options import AsJson
from polyfed.runs.config_files import preset_text

_SCHEMA = "schema"


def list_command(
    kind: Annotated[
        str, typer.Argument(help="presets, settings, methods, models, data, ..., schema (for editors)")
    ] = "",
    name: Annotated[str, typer.Argument(help="one of them, to see its settings")] = "",
    as_json: AsJson = False,
) -> None:
    """Show presets, methods, models, data and their settings.

    Examples: polyfed list; polyfed list presets; polyfed list presets scenes-demo; polyfed list models resnet;
    polyfed list schema > polyfed.schema.json
    """
    if kind == _SCHEMA:
        from polyfed.runs.schema import experiment_schema

        typer.echo(json.dumps(experiment_schema(), indent=1))
        return
    if as_json:
        typer.echo(json.dumps(_content(kind, name), indent=1))
        return
    if not kind:
        lines: Iterable[str] = _overview()
    elif kind == PRESETS:
        lines = preset_text(name).splitlines() if name else _all_presets()
    else:
        lines = _settings(kind, name) if name else _columns(catalogue.entries(kind))
    for line in lines:
        typer.echo(line)


def _content(kind: str, name: str) -> Any:
    """The answer as plain values."""
    if not kind:
        return catalogue.kinds()
    if kind == PRESETS:
        members = [facts for group in preset_groups().values() for facts in group]
        return asdict(preset_facts(name)) if name else [asdict(facts) for facts in members]
    return [asdict(setting) for setting in catalogue.settings_of(kind, name)] if name else catalogue.entries(kind)


def _overview() -> Iterator[str]:
    """One screen: families of presets with what they need, and the names of everything else."""
    groups = preset_groups()
    yield f"presets: {sum(map(len, groups.values()))} named experiments, in {len(groups)} families"
    yield from _columns({f"  {root}": _in_short(members) for root, members in groups.items()})
    width = max(40, shutil.get_terminal_size().columns)
    for kind, meaning in catalogue.kinds().items():
        if kind != PRESETS:
            text = f"{kind}: {meaning}: {', '.join(catalogue.entries(kind))}"
            yield from textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    yield "more: polyfed list presets; polyfed list presets scenes-demo; polyfed list models; ... models resnet"


def _in_short(members: list[PresetFacts]) -> str:
    variants = len(members) - 1
    others = f"; {variants} variant{'s' if variants > 1 else ''}" if variants else ""
    return f"needs {members[0].needs}; {members[0].cost}{others}"


def _all_presets() -> Iterator[str]:
    """A family after the other: what it needs in its heading, what differs behind its members."""
    for name, members in preset_groups().items():
        yield f"{name}: {_in_short(members)}"
        rows, root = {}, members[0]
        for facts in members:
            differing = [facts.needs] * (facts.needs != root.needs) + [facts.cost] * (facts.cost != root.cost)
            more = "; ".join(filter(None, differing))
            rows[f"  {facts.name}"] = facts.description + (f" [{more}]" if more else "")
        yield from _columns(rows)


def _settings(kind: str, name: str) -> Iterator[str]:
    """YAML with the defaults, and behind each its meaning and its values."""
    rows = [] if kind == catalogue.SETTINGS else [(f"name: {name}", "# defaults")]
    settings = catalogue.settings_of(kind, name)
    sections = {setting.name.rpartition(".")[0] for setting in settings}
    for setting in settings:
        above, _, key = setting.name.rpartition(".")
        indent = "  " * (above.count(".") + 1) if above else ""
        value = "" if setting.name in sections else f" {setting.default}"
        meaning = f"{setting.description}: " if setting.description else ""
        rows.append((f"{indent}{key}:{value}", f"# {meaning}{setting.allowed}"))
    return _rows(rows)


def _columns(rows: Mapping[str, str]) -> Iterator[str]:
    return _rows(list(rows.items()))


def _rows(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Two columns, one row a line whatever the width of the terminal, so that grep and less work."""
    width = max((len(first) for first, _ in rows if len(first) < 40), default=0)
    for first, second in rows:
        yield f"{first.ljust(width)}  {second}"
