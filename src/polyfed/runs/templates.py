"""Templates of the files that ``polyfed init`` writes."""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from jinja2 import Template


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20)
    return text.removesuffix("\n...\n").strip()


@functools.cache
def template(file: str) -> Template:
    """The template of a file."""
    from jinja2 import Environment, StrictUndefined

    text = resources.files("polyfed.runs").joinpath(f"{file}.j2").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["flow"] = flow
    return environment.from_string(text)
