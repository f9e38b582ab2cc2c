"""Optional extras of the installation; pyproject.toml alone lists their packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata

from polyfed.core.errors import ConfigError


@cache
def is_installed(extra: str) -> bool:
    """True if all packages of an extra are installed; also where polyfed runs uninstalled."""
    try:
        return all(metadata.version(package) for package in _packages().get(extra, ()))
    except metadata.PackageNotFoundError:
        return False


def extra_with(module: str) -> str | None:
    top = module.partition(".")[0]
    return next((extra for extra, packages in sorted(_packages().items()) if top in packages), None)


def known_extras() -> list[str]:
    """All extras of polyfed; empty where it runs uninstalled."""
    return sorted(_packages())


def how_to_install(extra: str) -> str:
    return f'pip install "polyfed[{extra}]"'


@contextmanager
def brought_by(extra: str) -> Iterator[None]:
    """Wrap imports of packages that an extra brings.

    Raises:
        ConfigError: a package is missing; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"this needs the package '{error.name}', which is not installed"
        raise ConfigError(f"{missing}; {how_to_install(extra)}") from error


@cache
def _packages() -> dict[str, list[str]]:
    """Extra -> the packages that it adds; without the developers' extra."""
    try:
        requirements = metadata.requires("polyfed") or []
    except metadata.PackageNotFoundError:
        return {}
    packages: dict[str, list[str]] = {}
    for text in requirements:
        named = re.fullmatch(r"([A-Za-z0-9._-]+).*extra == ['\"](\w+)['\"].*", text)
        if named is not None and named[2] != "dev":
            packages.setdefault(named[2], []).append(named[1])
    return packages
