"""The check of a site before it goes online: everything that can be known without taking part."""

from __future__ import annotations

import logging
import math
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, DataError, PayloadError, PolyfedError
from polyfed.core.files import whole
from polyfed.core.randomness import isolated
from polyfed.data.arrow import is_text
from polyfed.data.source import Split
from polyfed.deploy.check_network import Finding, Level, check_server, expiry, guarded
from polyfed.deploy.folders import (
    SiteFolder,
    days_left,
    fingerprint,
    is_private,
    public_half,
    read_certificate,
    read_public,
)
from polyfed.deploy.host import planned_for_samples, read_plan, require_affordable_here, require_protection, unlike
from polyfed.deploy.roster import check_roster
from polyfed.deploy.settings import Connection, ExpectedData, ProtectionDemands, SiteConfig, load_settings
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.client import ClientInfo
from polyfed.federation.data import OpenedData
from polyfed.federation.membership import Member
from polyfed.federation.population import Population
from polyfed.federation.settings import GroupSettings
from polyfed.privacy.accounting import between_sets, epsilon_of, fits
from polyfed.privacy.guard import PRIVATE, ledger_at
from polyfed.privacy.masking.mask_keeper import masking_replies
from polyfed.privacy.policy import Sendable, SentField
from polyfed.privacy.secret import read_secret
from polyfed.privacy.secure_sum import SecureSum
from polyfed.privacy.settings import KIND_KEYS
from polyfed.runs.starter import language_of
from polyfed.wire.payload import PublicRows, Representations, TensorBundle, Weights
from polyfed.wire.schema import steps_of

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
    plan = None
    try:
        plan = read_plan(site, config)
    except ConfigError as error:
        yield Finding("error", "plan.yaml", str(error), "ask the server's operator what is planned")
    absent = list(_absent_data(config))
    yield from absent
    if absent:  # nothing that follows can be looked at
        return
    salt = plan.salt if plan is not None else ""
    population = Population(config.data, config.public, None, config.clients, seed, salt=salt)
    yield from guarded("public set", lambda: _check_public(population, config))
    for name, expected in config.expected.items():
        yield from guarded(f"expected of '{name}'", partial(differences, population.data, name, expected))
    for member in population.members.values():
        yield from guarded(f"data of {member.id}", partial(_check_holding, population, member))
        yield from guarded(f"model of {member.id}", partial(_check_model, population, member, config))
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


def _absent_data(config: SiteConfig) -> Iterator[Finding]:
    """Sources whose files are not where site.yaml says."""
    for name, source in config.data.sources.items():
        path = getattr(source, "path", None)
        if isinstance(path, str) and not (place := whole(path, config.data.data_folder)).exists():
            detail = f"data.sources.{name}.path: there is no '{place}'"
            yield Finding("error", "site.yaml", detail, "say there where the site's data lie")


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
        yield Finding("ok", "public set", f"{detail}; no public_digest in agreed.yaml to compare with")
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


def check_protection(config: SiteConfig, population: Population, plan: RunSpec | None) -> Iterator[Finding]:
    """The site's demands, the protection of the planned run and of each that was announced, and what was given away."""
    demands = config.demands
    yield Finding("ok", "demands", _in_words(demands))
    demanded = demands or ProtectionDemands()
    if plan is not None:
        yield _met(plan, config, population)
        yield from _planned(plan, population, demanded)
    announced = sorted(config.state_dir.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    for path in announced:
        # earlier runs may have been planned otherwise
        yield _announced(path, plan if path == announced[-1] else None, demanded.delta)
    folder, secret = config.state_dir / PRIVATE, config.secret or config.state_dir / PRIVATE / "secret"
    names = {path.stem for pattern in ("*.jsonl", "*.head") for path in folder.glob(pattern)}
    for name in sorted(names | {*(population.members if secret.exists() else ())}):
        yield _spent(folder / f"{name}.jsonl", secret, demands)


def _in_words(demands: ProtectionDemands | None) -> str:
    if demands is None:
        return "none: replies may leave without noise or masks (demands in site.yaml would refuse that)"
    limit = "any epsilon" if demands.max_epsilon is None else f"epsilon {demands.max_epsilon:g} at most"
    sums = "masked sums only" if demands.sums == "only" else "replies by themselves"
    kinds = ", ".join(f"{key} {getattr(demands, key)}" for key in KIND_KEYS.values())
    metrics = "as they are" if demands.metrics else "never"
    planned = "the planned run alone; " if demands.plan == "exact" else ""
    return f"{planned}{limit} at delta {demands.delta:g} over all runs; {sums}; {kinds}; test metrics {metrics}"


def _met(plan: RunSpec, config: SiteConfig, population: Population) -> Finding:
    try:
        require_protection(plan, config)
        require_affordable_here(plan, config, population)
    except PayloadError as error:
        return Finding("error", "plan and demands", f"the plan would be refused: {error}", "agree on another plan")
    return Finding("ok", "plan and demands", "the planned run meets them")


def _planned(plan: RunSpec, population: Population, demands: ProtectionDemands) -> Iterator[Finding]:
    """Protection of the planned run, with the epsilon of each client."""
    delta, privacy = demands.delta, plan.privacy
    yield Finding("ok", "protection in the plan", plan.policy.words(delta))
    if privacy is not None:
        between = between_sets(privacy.samples is not None, demands.neighbours)
        yield Finding("ok", "what epsilon means", f"the epsilon of the demands and below is between {between}")
    # that of noise on replies is the same for all, and stands there
    for client, step, epsilon in planned_for_samples(plan, population, delta, demands.neighbours):
        number = privacy.planned_releases(plan.rounds) if privacy is not None else 0
        detail = f"epsilon {epsilon:.3g} at delta {delta:g} in {number} replies to {step}"
        yield Finding("ok", f"planned for {client}", detail)


def _announced(path: Path, plan: RunSpec | None, delta: float) -> Finding:
    spec = RunSpec.model_validate_json(path.read_bytes())
    other = [] if plan is None else unlike(spec, plan)
    comparison = "" if plan is None else f"; unlike plan.yaml in {', '.join(other)}" if other else "; as planned"
    return Finding("warning" if other else "ok", f"protection in {spec.run}", spec.policy.words(delta) + comparison)


def _spent(path: Path, secret: Path, demands: ProtectionDemands | None) -> Finding:
    what = f"given away by {path.stem}"
    try:
        costs = ledger_at(path, read_secret(secret), secret).costs()
    except (DataError, ConfigError) as error:
        return Finding("error", what, str(error))
    meant = demands or ProtectionDemands()
    epsilon = epsilon_of(costs, meant.delta, meant.neighbours)
    detail = f"epsilon {epsilon:.3g} at delta {meant.delta:g} in {len(costs)} replies"
    if meant.max_epsilon is not None:
        over = not fits(costs, meant.max_epsilon, meant.delta, meant.neighbours)
        return Finding("error" if over else "ok", what, f"{detail}, of {meant.max_epsilon:g}")
    return Finding("ok", what, detail)


def what_leaves(population: Population, config: SiteConfig, plan: RunSpec | None) -> Iterator[Finding]:
    """For every step, what each client replies, and what hides it; then what stays in the clear, and what is known."""
    if plan is None:
        methods = ", ".join(config.algorithms) or "any that polyfed ships"
        detail = f"nobody wrote down what is planned; methods that may run here: {methods}"
        yield Finding("warning", "leaves with a run", detail, "ask the server's operator for plan.yaml")
    else:
        yield from _Leaving(population, plan).findings()
        parts = [
            f"{sent.field or 'numbers'} of {sent.step}"
            for sent in plan.policy.fields
            if sent.step_kind == "step" and not (sent.masked or sent.noisy)
        ]
        parts += ["test metrics"] if plan.evaluates else []
        parts += [f"what is told at joining ({', '.join(ClientInfo.labels().values())})", "who replied, and when"]
        yield Finding("ok", "stays in the clear", ", ".join(parts))
    for info in population.infos:
        facts = vars(info) | {"modalities": "+".join(info.modalities)}
        yield Finding("ok", "leaves at the start", ", ".join(f"{key} {value}" for key, value in facts.items()))
    if config.tracebacks:
        detail = "message and traceback of a failed step; they may show paths, file names, texts and values"
        remedy = "set tracebacks: false in site.yaml to send the class of error and a number alone"
        yield Finding("warning", "leaves on failure", detail, remedy)
    else:
        yield Finding("ok", "leaves on failure", "the class of error and a number; the text is in the site's log")
    yield Finding(
        "ok",
        "never leaves",
        "samples, labels, their ids and file names, what clients keep in the state folder, the node key. This holds "
        "for the steps of the polyfed that is installed here; the site runs no program of the server",
    )


@dataclass(frozen=True)
class _Leaving:
    """What leaves with the planned run.

    Attributes:
        population: who lives here.
        plan: the run.
    """

    population: Population
    plan: RunSpec

    def findings(self) -> Iterator[Finding]:
        """A line for each step, with whose reply it is."""
        what = f"leaves with {self.plan.algorithm.component_name()}"
        for step, fields in self._steps().items():
            senders: dict[str, list[str]] = {}
            for member in self.population.members.values():
                senders.setdefault(self._reply(fields, member), []).append(member.id)
            for reply, ids in senders.items():
                yield Finding("ok", what, f"{', '.join(ids)}: {step}: {reply}")
        if self._secure is not None:
            for step, reply in masking_replies().items():
                yield Finding("ok", what, f"{', '.join(self.population.members)}: {step}: {reply}")

    @property
    def _secure(self) -> SecureSum | None:
        return self.plan.secure if self.plan.secure is not None and self.plan.secure.masks else None

    def _steps(self) -> dict[str, list[SentField]]:
        steps: dict[str, list[SentField]] = {
            step: []
            for step, schema in steps_of(self.plan.algorithm).items()
            if schema.kind != "query" or self.plan.evaluates
        }
        for sent in self.plan.policy.fields:
            if sent.step in steps:
                steps[sent.step].append(sent)
        return steps

    def _reply(self, fields: list[SentField], member: Member) -> str:
        return ", ".join(self._field(sent, member) for sent in fields) or "nothing but that it is done"

    def _field(self, sent: SentField, member: Member) -> str:
        size = " or ".join(self._size(sent, kind, member) for kind in sent.kinds)
        description = f"{size}; {self.plan.policy.how(sent)}"
        if sent.field:
            return f"{sent.field} ({description})"
        examples = "metrics of its test" if sent.step_kind == "query" else "losses"
        return f"numbers such as {examples} ({description})"

    def _size(self, sent: SentField, kind: Sendable, member: Member) -> str:
        """What a field of a reply holds, and how large it is."""
        if not issubclass(kind, TensorBundle):
            return kind.__name__ if not sent.field else f"one {kind.__name__}"
        if issubclass(kind, Representations):
            return self._rows(sent, member)
        if issubclass(kind, Weights):
            state = self.population.client_model(member).exchanged()
            types = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
            size = sum(value.numel() * (self._word(sent) or value.element_size()) for value in state.values())
            return f"{len(state):,} tensors of the model, {'+'.join(types)}, {size / 2**20:,.2f} MiB"
        of = "of public samples" if issubclass(kind, PublicRows) else "named tensors"
        return f"{KIND_KEYS.get(kind, kind.label)}: {of}, of a size that the method decides"

    def _rows(self, sent: SentField, member: Member) -> str:
        samples = self.population.public_samples(member.views)
        if samples is None:
            return "of the public set, which there is none of"
        exchange = getattr(self.plan.algorithm, "public", None)
        drawn = exchange.samples if isinstance(exchange, PublicExchange) else None
        rows, width, names = drawn or len(samples), member.model.dim, list(samples.modalities)
        size = rows * width * (self._word(sent) or 4) * len(names) / 2**20
        kind = "" if sent.field == Representations.label else "representations, "
        return f"{kind}{'+'.join(names)}: {rows:,} x {width} float32 each, {size:,.2f} MiB in all"

    def _word(self, sent: SentField) -> int | None:
        return self._secure.bits // 8 if self._secure is not None and sent.masked else None


_log = logging.getLogger(__name__)

_TEXTS = 1000  # that tell the language


def described(split: Split) -> ExpectedData:
    """Columns, classes, number and language of a split's items."""
    texts: list[str] = []
    for name in split.columns:
        column = split.modality(name)
        column = column.without_gaps()[0] if column.gaps else column
        first = column.take(np.arange(min(_TEXTS, len(column.flat_values()) if column.gaps else len(split))))
        texts += first.to_pylist() if is_text(first.type) else []
    return ExpectedData(
        split=split.name,
        columns={**split.columns, **split.targets},
        classes={name: tuple(classes) for name, classes in split.classes.items()},
        items=len(split),
        language=language_of(texts),
    )


def expected_data(at_hand: Population, group: GroupSettings) -> dict[str, Any]:
    """Source of a group -> its data as they are here; nothing where they are at the site alone."""
    try:
        return {group.source: described(at_hand.data.split(group.source, group.split)).model_dump(mode="json")}
    except PolyfedError as error:
        _log.warning("polyfed deploy check will compare with nothing what cannot be read here: %s", error)
        return {}


def differences(data: OpenedData, source: str, expected: ExpectedData) -> Iterator[Finding]:
    """What of a source is not as expected: wrong where a model would learn something else, else a warning."""
    here = described(data.split(source, expected.split))
    what, remedy = f"expected of '{source}'", "compare the data with those that were agreed upon"
    if here == expected:
        yield Finding("ok", what, "columns, classes, number of items and language")
    for key in ("columns", "classes", "items", "language"):
        found, wanted = getattr(here, key), getattr(expected, key)
        is_near = key == "items" and wanted <= 2 * found <= 4 * wanted
        if found != wanted and not is_near:
            level: Level = "error" if key in ("columns", "classes") else "warning"
            shown = [value or "English, or no texts" if key == "language" else value for value in (found, wanted)]
            yield Finding(level, what, f"{key}: found {shown[0]}, expected {shown[1]}", remedy)
