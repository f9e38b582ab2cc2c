"""Checks of a site's folder and machine: keys, certificate, state folder, device, versions."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from polyfed.deploy.certificates import days_left, read_certificate
from polyfed.deploy.files import SiteFolder, is_private
from polyfed.deploy.findings import Finding, Level
from polyfed.deploy.keys import public_half, read_public
from polyfed.deploy.site_config import SiteConfig
from polyfed.engines.node_keys import fingerprint

TESTED_FLOWER = "1.41."
_SHORT_DISK, _LITTLE_DISK = 100 * 2**20, 2**30
_RENEW_DAYS = 30


def check_key(site: SiteFolder) -> Iterator[Finding]:
    """The node key is there, its owner's alone, and the public half beside it is its own."""
    public = public_half(site.key)
    if is_private(site.key):
        yield Finding("ok", "node key", f"{fingerprint(public)}, readable by its owner alone")
    else:
        yield Finding("error", "node key", "others can read node.key", f"chmod 600 {site.key}")
    if site.public_key.exists() and read_public(site.public_key) != public:
        yield Finding(
            "error",
            "public key",
            "node.pub does not belong to node.key",
            "move both away, run: polyfed deploy key FOLDER, and give the new node.pub to the server's operator",
        )


def check_authority(site: SiteFolder) -> Iterator[Finding]:
    """The authority's certificate is there and has not expired."""
    left = days_left(read_certificate(site.authority))
    yield expiry("authority", left, "the federation's ca.crt", "ask the server's operator for a new ca.crt")


def expiry(what: str, left: float, name: str, remedy: str) -> Finding:
    """What a certificate's remaining days mean."""
    if left < 0:
        return Finding("error", what, f"{name} expired {-left:.0f} days ago", remedy)
    if left < _RENEW_DAYS:
        return Finding("warning", what, f"{name} expires in {left:.0f} days", remedy)
    return Finding("ok", what, f"{name} is valid for {left:.0f} days")


def check_state_folder(config: SiteConfig) -> Iterator[Finding]:
    """What clients keep can be written, and there is room for it."""
    folder = config.state_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            "error",
            "state folder",
            f"'{folder}' cannot be written to: {error.strerror}",
            "set state_dir in site.yaml to a folder that can",
        )
        return
    yield _room(folder)


def _room(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    detail = f"'{folder}' is writable, {free / 2**30:,.1f} GiB free"
    if free < _LITTLE_DISK:
        level: Level = "error" if free < _SHORT_DISK else "warning"
        return Finding(level, "state folder", detail, "make room, or set state_dir in site.yaml to another disk")
    return Finding("ok", "state folder", detail)


def check_privacy(config: SiteConfig) -> Iterator[Finding]:
    """Nobody else can read what is kept of the data; a polyfed of before may have left it open."""
    for folder in filter(None, (config.data.cache_folder, config.state_dir)):
        opened = next((path for path in folder.rglob("*") if path.is_file() and not is_private(path)), None)
        if opened is not None:
            remedy = f"chmod -R go= {shlex.quote(str(folder))}"
            yield Finding("warning", "private files", f"others can read {opened}", remedy)


def check_device(config: SiteConfig) -> Iterator[Finding]:
    """The configured device is usable."""
    from polyfed.core.device import resolve_device

    device = resolve_device(config.run.device)
    yield Finding("ok", "device", f"{device}, {config.run.threads} threads of {os.cpu_count()}")


def check_versions() -> Iterator[Finding]:
    """Versions; all sites and the server should have the same."""
    yield Finding(
        "ok", "versions", f"polyfed {version('polyfed')}, torch {version('torch')}, {platform.python_version()}"
    )
    try:
        flower = version("flwr")
    except PackageNotFoundError:
        yield Finding("error", "flower", "flwr is not installed", "pip install 'polyfed[deploy]'")
        return
    if flower.startswith(TESTED_FLOWER):
        yield Finding("ok", "flower", f"flwr {flower}")
    else:
        remedy = f"install flwr {TESTED_FLOWER}* at all sites and at the server"
        yield Finding("warning", "flower", f"flwr {flower} is not what polyfed is tested with", remedy)
