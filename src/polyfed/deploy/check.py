"""The check of a site before it goes online: everything that can be known without taking part."""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import cast

import torch

from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.deploy.check_network import check_server
from polyfed.deploy.check_protection import check_protection
from polyfed.deploy.files import SiteFolder, is_private
from polyfed.deploy.findings import Finding, Level, expiry, guarded
from polyfed.deploy.keys import days_left, public_half, read_certificate, read_public
from polyfed.deploy.leaving import what_leaves
from polyfed.deploy.node_keys import fingerprint
from polyfed.deploy.plan import read_plan
from polyfed.deploy.roster import check_roster
from polyfed.deploy.settings import Connection, SiteConfig, load_settings
from polyfed.federation.membership import Member
from polyfed.federation.population import Population

TESTED_FLOWER = "1.41."
_SHORT_DISK, _LITTLE_DISK = 100 * 2**20, 2**30
_SHOWN_CLASSES = 12


def check_site(folder: Path, *, network: bool = True) -> Iterator[Finding]:
    """Look at a site's folder, machine, data and models, at its way to the server, and list what will leave it.

    Nothing is sent but requests without content; the site does not take part by it. Findings come as they are made.

    Args:
        folder: the site's folder.
        network: whether to contact the server.
    """
    site = SiteFolder(folder.resolve())
    yield from _check_versions()
    yield from guarded("node key", lambda: _check_key(site))
    yield from guarded("authority", lambda: _check_authority(site))
    connection = None
    try:
        connection = load_settings(Connection, site.connection)
    except ConfigError as error:
        yield Finding("error", "connection.yaml", str(error))
    if connection is not None and network:
        yield from guarded("server", lambda: check_server(site, connection))
    yield from guarded("site.yaml", lambda: _check_config(site, connection.seed if connection else 0))


def _check_config(site: SiteFolder, seed: int) -> Iterator[Finding]:
    config = SiteConfig.load(site.config)
    names = ", ".join(f"{name} ({group.count})" for name, group in config.clients.items())
    yield Finding("ok", "site.yaml", f"site '{config.name}' with clients {names}")
    yield from guarded("state folder", lambda: _check_state_folder(config.state_dir))
    yield from guarded("private files", lambda: _check_privacy(config))
    yield from guarded("device", lambda: _check_device(config))
    population = Population(config.data, config.public, None, config.clients, seed)
    yield from guarded("public set", lambda: _check_public(population, config))
    for member in population.members.values():
        yield from guarded(f"data of {member.id}", partial(_check_holding, population, member))
        yield from guarded(f"model of {member.id}", partial(_check_model, population, member, config))
    plan = None
    try:
        plan = read_plan(site, config)
    except ConfigError as error:
        yield Finding("error", "plan.yaml", str(error), "ask the server's operator what is planned")
    yield from guarded("roster", lambda: check_roster(site, config, plan))
    yield from guarded("protection", lambda: check_protection(config, population, plan))
    yield from guarded("what leaves", lambda: what_leaves(population, config, plan))


# ---- the folder and the machine


def _check_key(site: SiteFolder) -> Iterator[Finding]:
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


def _check_authority(site: SiteFolder) -> Iterator[Finding]:
    left = days_left(read_certificate(site.authority))
    yield expiry("authority", left, "the federation's ca.crt", "ask the server's operator for a new ca.crt")


def _check_state_folder(folder: Path) -> Iterator[Finding]:
    """What clients keep can be written, and there is room for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permissions alone do not say: the disk may be read-only, or another's
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"'{folder}' cannot be written to: {error.strerror}"
        yield Finding("error", "state folder", detail, "set state_dir in site.yaml to a folder that can")
        return
    free = shutil.disk_usage(folder).free
    detail = f"'{folder}' is writable, {free / 2**30:,.1f} GiB free"
    if free < _LITTLE_DISK:
        level: Level = "error" if free < _SHORT_DISK else "warning"
        yield Finding(level, "state folder", detail, "make room, or set state_dir in site.yaml to another disk")
    else:
        yield Finding("ok", "state folder", detail)


def _check_privacy(config: SiteConfig) -> Iterator[Finding]:
    """Nobody else can read what is kept of the data; a polyfed of before may have left it open."""
    for folder in filter(None, (config.data.cache_folder, config.state_dir)):
        opened = next((path for path in folder.rglob("*") if path.is_file() and not is_private(path)), None)
        if opened is not None:
            remedy = f"chmod -R go= {shlex.quote(str(folder))}"
            yield Finding("warning", "private files", f"others can read {opened}", remedy)


def _check_device(config: SiteConfig) -> Iterator[Finding]:
    device = resolve_device(config.run.device)
    yield Finding("ok", "device", f"{device}, {config.run.threads} threads of {os.cpu_count()}")


def _check_versions() -> Iterator[Finding]:
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


# ---- data and models


def _check_holding(population: Population, member: Member) -> Iterator[Finding]:
    """A client's private samples, by class where there are labels, and its test samples."""
    held = population.holding(member)
    test = population.test(member)
    detail = f"{held['items']:,} items, {held['samples']:,} samples of '{held['source']}' {held['split']}"
    if isinstance(also := held.get("also"), dict):
        of = "the public set" if also["public"] else f"'{also['source']}' {also['split']}"
        detail += f", among them {also['items']:,} items of {of}"
    detail += ", no test" if test is None else f", {len(test):,} for test"
    if held["labels"]:
        counts = cast("Mapping[str, int]", held["labels"])
        shown = ", ".join(f"{name} {number:,}" for name, number in list(counts.items())[:_SHOWN_CLASSES])
        more = len(counts) - _SHOWN_CLASSES
        detail += f"; {shown}" + (f" and {more} more classes" if more > 0 else "")
    yield Finding("ok", f"data of {member.id}", detail)


def _check_public(population: Population, config: SiteConfig) -> Iterator[Finding]:
    """The public set is here, in the agreed order, and disjoint from what is private."""
    public = population.public
    if public is None:
        yield Finding("ok", "public set", "none")
        return
    samples = len(public.samples({}))
    detail = f"{len(public.items):,} items, {samples:,} samples of '{public.settings.source}', {public.order}"
    if config.public_digest is None:
        yield Finding("ok", "public set", f"{detail}; no public_digest in site.yaml to compare with")
    elif public.order == config.public_digest:
        yield Finding("ok", "public set", f"{detail}, as agreed")
    else:
        remedy = "compare 'public', its source's files, and 'seed' in connection.yaml with the server's"
        yield Finding("error", "public set", f"{detail}, but agreed is {config.public_digest}", remedy)
    population.require_sound()


def _check_model(population: Population, member: Member, config: SiteConfig) -> Iterator[Finding]:
    """A client's model can be built, and takes one of its batches."""
    device, samples = resolve_device(config.run.device), population.train(member)
    model = population.client_model(member).to(device)
    batch = samples.batch(torch.arange(min(len(samples), member.settings.training.batch_size)), None).to(device)
    head = model.heads[member.head] if member.head in model.heads else None
    with isolated(population.seed, "check", member.id):
        loss = float(member.settings.task.loss(model, head, batch).detach())
    count = sum(value.numel() for value in model.parameters())
    detail = f"{count:,} parameters, width {model.dim}, {'+'.join(model.modalities)}"
    if math.isfinite(loss):
        yield Finding("ok", f"model of {member.id}", f"{detail}; loss on a batch of {len(batch)}: {loss:.3f}")
    else:
        detail = f"{detail}; its loss on a batch of {len(batch)} is {loss}"
        remedy = "look at the inputs for NaN, and at the view's normalisation"
        yield Finding("error", f"model of {member.id}", detail, remedy)
