"""Check of a site before it goes online: all that can be verified without taking part in a run."""

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
from typing import Any, cast

import numpy as np
import torch

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, DataError, PolyfedError
from polyfed.core.files import whole
from polyfed.core.randomness import isolated
from polyfed.data.arrow import is_text
from polyfed.data.source import Split
from polyfed.deploy import folders
from polyfed.deploy.check_network import Finding, Level, check_server, expiry, guarded
from polyfed.deploy.folders import SiteFolder
from polyfed.deploy.host import Announced, demands_of, read_plan, unlike
from polyfed.deploy.settings import Connection, ExpectedData, SiteConfig, load_settings, own_roster
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
from polyfed.privacy.settings import KIND_KEYS
from polyfed.runs.starter import language_of
from polyfed.wire.payload import PublicRows, Representations, TensorBundle, Weights
from polyfed.wire.schema import steps_of

TESTED_FLOWER = "1.41."
_SHORT_DISK, _LITTLE_DISK = 100 * 2**20, 2**30
_SHOWN_CLASSES = 12
_TEXTS = 1000  # texts that decide the language


def check_site(folder: Path, *, network: bool = True) -> Iterator[Finding]:
    """Findings on a site's folder, machine, data, models and connection, and on what leaves it, as they are made.

    Only requests without content are sent; the site does not take part in a run. A problem is reported once, where it
    is seen first.

    Args:
        folder: Folder of the site.
        network: True to contact the server.
    """
    reported: set[str] = set()
    for finding in _findings(SiteFolder(folder.resolve()), network):
        if finding.level != "error" or finding.detail not in reported:
            yield finding
        if finding.level == "error":
            reported.add(finding.detail)


def _findings(site: SiteFolder, network: bool) -> Iterator[Finding]:
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
        yield Finding("error", "plan.yaml", str(error), "ask the server's operator for the plan")
    absent = list(_absent_data(config))
    yield from absent
    if absent:  # all further checks need the data
        return
    salt = plan.salt if plan is not None else ""
    population = Population(config.data, config.public, None, config.clients, seed, salt=salt)
    for name, expected in config.expected.items():
        yield from guarded(f"expected of '{name}'", partial(_check_expected, population.data, name, expected))
    yield from guarded("public set", lambda: _check_public(population, config))
    for member in population.members.values():
        yield from guarded(f"data of {member.id}", partial(_check_holding, population, member))
        yield from guarded(f"model of {member.id}", partial(_check_model, population, member, config))
    yield from guarded("roster", lambda: _check_roster(site, config, plan))
    yield from guarded("protection", lambda: _check_protection(config, population, plan))
    yield from guarded("what leaves", lambda: _what_leaves(population, config, plan))


# ---- the folder and the machine


def _check_versions() -> Iterator[Finding]:
    """Versions; all sites and the server should have the same."""
    own = f"polyfed {version('polyfed')}, torch {version('torch')}, {platform.python_version()}"
    yield Finding("ok", "versions", own)
    try:
        flower = version("flwr")
    except PackageNotFoundError:
        yield Finding("error", "flower", "flwr is not installed", "pip install 'polyfed[deploy]'")
        return
    if flower.startswith(TESTED_FLOWER):
        yield Finding("ok", "flower", f"flwr {flower}")
    else:
        remedy = f"install flwr {TESTED_FLOWER}* at all sites and at the server"
        yield Finding("warning", "flower", f"flwr {flower} is not the tested version", remedy)


def _check_key(site: SiteFolder) -> Iterator[Finding]:
    """The node key exists, only its owner can read it, and the public half next to it belongs to it."""
    public = folders.public_half(site.key)
    if folders.is_private(site.key):
        yield Finding("ok", "node key", f"{folders.fingerprint(public)}, readable by its owner only")
    else:
        yield Finding("error", "node key", "others can read node.key", f"chmod 600 {site.key}")
    if site.public_key.exists() and folders.read_public(site.public_key) != public:
        remedy = "move both away, run: polyfed deploy key FOLDER, and send the new node.pub to the server's operator"
        yield Finding("error", "public key", "node.pub does not belong to node.key", remedy)


def _check_authority(site: SiteFolder) -> Iterator[Finding]:
    left = folders.days_left(folders.read_certificate(site.authority))
    yield expiry("authority", left, "the federation's ca.crt", "ask the server's operator for a new ca.crt")


def _check_state_folder(folder: Path) -> Iterator[Finding]:
    """The clients' states can be written, and there is room for them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # permissions are not enough: the disk may be read-only, or of another user
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"'{folder}' cannot be written to: {error.strerror}"
        yield Finding("error", "state folder", detail, "set state_dir in site.yaml to a folder that can")
        return
    free = shutil.disk_usage(folder).free
    level: Level = "error" if free < _SHORT_DISK else "warning" if free < _LITTLE_DISK else "ok"
    remedy = "" if level == "ok" else "make room, or set state_dir in site.yaml to another disk"
    yield Finding(level, "state folder", f"'{folder}' is writable, {free / 2**30:,.1f} GiB free", remedy)


def _check_privacy(config: SiteConfig) -> Iterator[Finding]:
    """Only the site's user can read stored data; an earlier polyfed may have left files open."""
    for folder in filter(None, (config.data.cache_folder, config.state_dir)):
        opened = next((path for path in folder.rglob("*") if path.is_file() and not folders.is_private(path)), None)
        if opened is not None:
            remedy = f"chmod -R go= {shlex.quote(str(folder))}"
            yield Finding("warning", "private files", f"others can read {opened}", remedy)


def _check_device(config: SiteConfig) -> Iterator[Finding]:
    device = resolve_device(config.run.device)
    yield Finding("ok", "device", f"{device}, {config.run.threads} threads of {os.cpu_count()}")


def _check_roster(site: SiteFolder, config: SiteConfig, plan: RunSpec | None) -> Iterator[Finding]:
    """The site has the keys of all others, so that a server cannot play the other clients of a masked sum."""
    if config.roster is None:
        if plan is not None and plan.secure is not None and plan.secure.masks:
            detail = "none: the server could send keys of its own, and read the replies of this site's clients"
            yield Finding("warning", "roster", detail, "set roster in site.yaml, and write the sites' keys into it")
        return
    sites = own_roster(site, config).sites
    for name, entry in sites.items():
        if entry.key is None:
            remedy = f"have its node.pub from the site itself, then: polyfed deploy trust {site.path} {name} node.pub"
            yield Finding("error", "roster", f"no key of site '{name}'", remedy)
    keys = ", ".join(f"{name} {folders.fingerprint(entry.key)}" for name, entry in sites.items() if entry.key)
    yield Finding("ok", "roster", f"{keys}; compare them with the sites, over the phone")


# ---- data and models


def _absent_data(config: SiteConfig) -> Iterator[Finding]:
    """Sources whose files are not at their path in site.yaml."""
    for name, source in config.data.sources.items():
        path = getattr(source, "path", None)
        if isinstance(path, str) and not (expected := whole(path, config.data.data_folder)).exists():
            detail = f"data.sources.{name}.path: '{expected}' is missing"
            yield Finding("error", "site.yaml", detail, "set it to the path of the site's data")


def described(split: Split) -> ExpectedData:
    """Columns, classes, number and language of a split's items."""
    texts: list[str] = []
    for name in split.columns:
        column = split.modality(name)
        column = column.without_gaps()[0] if column.gaps else column
        first = column.take(np.arange(min(_TEXTS, len(column.flat_values()) if column.gaps else len(split))))
        texts += first.to_pylist() if is_text(first.type) else []
    columns = {**split.columns, **split.targets}
    classes = {name: tuple(own) for name, own in split.classes.items()}
    language = language_of(texts)
    return ExpectedData(split=split.name, columns=columns, classes=classes, items=len(split), language=language)


def expected_data(at_hand: Population, group: GroupSettings) -> dict[str, Any]:
    """Source of a group -> its data as they are here; empty if they are at the site only."""
    try:
        return {group.source: described(at_hand.data.split(group.source, group.split)).model_dump(mode="json")}
    except PolyfedError:
        return {}


def _check_expected(data: OpenedData, source: str, expected: ExpectedData) -> Iterator[Finding]:
    """Differences of a source from the agreed data: errors if a model would learn something else, else warnings."""
    here = described(data.split(source, expected.split))
    what, remedy = f"expected of '{source}'", "compare the data with those that were agreed upon"
    if here == expected:
        yield Finding("ok", what, "columns, classes, number of items and language")
    for key in ("columns", "classes", "items", "language"):
        own, wanted = getattr(here, key), getattr(expected, key)
        if own != wanted and not (key == "items" and wanted <= 2 * own <= 4 * wanted):
            level: Level = "error" if key in ("columns", "classes") else "warning"
            shown = [value or "English, or no texts" if key == "language" else value for value in (own, wanted)]
            yield Finding(level, what, f"{key}: found {shown[0]}, expected {shown[1]}", remedy)


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
    """The public set is here, in the agreed order, and disjoint from the private data."""
    if (public := population.public) is None:
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
    detail += f"; loss on a batch of {len(batch)}: {loss:.3f}"
    remedy = "" if math.isfinite(loss) else "look for NaN in the inputs, and at the view's normalisation"
    yield Finding("error" if remedy else "ok", f"model of {member.id}", detail, remedy)


# ---- protection, and the content of replies


def _check_protection(config: SiteConfig, population: Population, plan: RunSpec | None) -> Iterator[Finding]:
    """The site's demands, the protection of the planned and the announced runs, and the clients' spending."""
    if config.demands is None:
        detail = "none: replies may leave without noise or masks (demands in site.yaml would refuse that)"
        yield Finding("ok", "demands", detail)
    if plan is not None:
        yield from _check_plan(Announced(plan, config, plan, population))
    announced = sorted(config.state_dir.glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    for path in announced:
        # earlier runs may have had another plan
        yield _announced(path, plan if path == announced[-1] else None, config.demanded.delta)
    folder, secret = config.state_dir / PRIVATE, config.secret or config.state_dir / PRIVATE / "secret"
    names = {path.stem for pattern in ("*.jsonl", "*.head") for path in folder.glob(pattern)}
    for name in sorted(names | {*(population.members if secret.exists() else ())}):
        yield _spent(folder / f"{name}.jsonl", secret, config)


def _check_plan(run: Announced) -> Iterator[Finding]:
    """Each demand in force against the planned run; the run's protection, with the epsilon of each client."""
    plan, delta, privacy = run.spec, run.demands.delta, run.spec.privacy
    for demand in demands_of(run.config):
        unmet = "; ".join(demand.unmet(run))
        name, _, value = demand.stated(run.demands).partition(": ")
        detail = f"{value}; {unmet or 'the planned run meets it'}"
        yield Finding("error" if unmet else "ok", name, detail, demand.remedy if unmet else "")
    yield Finding("ok", "protection in the plan", plan.policy.words(delta))
    if privacy is None:
        return
    between = between_sets(privacy.samples is not None, run.demands.neighbours)
    yield Finding("ok", "meaning of epsilon", f"the epsilon of the demands and below is between {between}")
    # the epsilon of noise on replies is the same for all, and part of the plan's protection
    for client, step, epsilon in run.planned_for_samples():
        number = privacy.planned_releases(plan.rounds)
        detail = f"epsilon {epsilon:.3g} at delta {delta:g} in {number} replies to {step}"
        yield Finding("ok", f"planned for {client}", detail)


def _announced(path: Path, plan: RunSpec | None, delta: float) -> Finding:
    spec = RunSpec.model_validate_json(path.read_bytes())
    other = [] if plan is None else unlike(spec, plan)
    comparison = "" if plan is None else f"; unlike plan.yaml in {', '.join(other)}" if other else "; as planned"
    return Finding("warning" if other else "ok", f"protection in {spec.run}", spec.policy.words(delta) + comparison)


def _spent(path: Path, secret: Path, config: SiteConfig) -> Finding:
    what, most, delta = f"spent by {path.stem}", config.demanded.max_epsilon, config.demanded.delta
    try:
        costs = ledger_at(path, read_secret(secret), secret).costs()
    except (DataError, ConfigError) as error:
        return Finding("error", what, str(error))
    epsilon = epsilon_of(costs, delta, config.demanded.neighbours)
    over = most is not None and not fits(costs, most, delta, config.demanded.neighbours)
    detail = f"epsilon {epsilon:.3g} at delta {delta:g} in {len(costs)} replies"
    return Finding("error" if over else "ok", what, detail + ("" if most is None else f", of {most:g}"))


def _what_leaves(population: Population, config: SiteConfig, plan: RunSpec | None) -> Iterator[Finding]:
    """Each client's reply to every step with its protection, then the content in the clear, and content at joining."""
    if plan is None:
        methods = ", ".join(config.algorithms) or "any that polyfed ships"
        detail = f"unknown without a plan; methods that may run here: {methods}"
        yield Finding("warning", "leaves with a run", detail, "ask the server's operator for plan.yaml")
    else:
        yield from _replies(population, plan)
        clear = (sent for sent in plan.policy.fields if sent.step_kind == "step" and not (sent.masked or sent.noisy))
        parts = [f"{sent.field or 'numbers'} of {sent.step}" for sent in clear]
        parts += ["test metrics"] if plan.evaluates else []
        parts += [f"the description at joining ({', '.join(ClientInfo.labels().values())})", "time of each reply"]
        yield Finding("ok", "stays in the clear", ", ".join(parts))
    for info in population.infos:
        facts = vars(info) | {"modalities": "+".join(info.modalities)}
        yield Finding("ok", "leaves at the start", ", ".join(f"{key} {value}" for key, value in facts.items()))
    if config.tracebacks:
        detail = "message and traceback of a failed step; they may show paths, file names, texts and values"
        remedy = "set tracebacks: false in site.yaml to send only the class of error and a number"
        yield Finding("warning", "leaves on failure", detail, remedy)
    else:
        yield Finding("ok", "leaves on failure", "the class of error and a number; the text is in the site's log")
    kept = (
        "samples, labels, their ids and file names, the clients' states, the node key. This holds for the steps of the "
        "polyfed that is installed here; the site runs no program of the server"
    )
    yield Finding("ok", "never leaves", kept)


def _replies(population: Population, plan: RunSpec) -> Iterator[Finding]:
    """Replies to each step of the planned run, with the clients that send them."""
    what, members = f"leaves with {plan.algorithm.component_name()}", population.members.values()
    for step, schema in steps_of(plan.algorithm).items():
        if schema.kind == "query" and not plan.evaluates:
            continue
        fields = [sent for sent in plan.policy.fields if sent.step == step]
        senders: dict[str, list[str]] = {}
        for member in members:
            reply = ", ".join(_field(sent, member, population, plan) for sent in fields)
            senders.setdefault(reply or "only that it is done", []).append(member.id)
        for reply, ids in senders.items():
            yield Finding("ok", what, f"{', '.join(ids)}: {step}: {reply}")
    if plan.secure is not None and plan.secure.masks:
        for step, reply in masking_replies().items():
            yield Finding("ok", what, f"{', '.join(population.members)}: {step}: {reply}")


def _field(sent: SentField, member: Member, population: Population, plan: RunSpec) -> str:
    """Content, size and protection of a field of a reply."""
    word = plan.secure.bits // 8 if plan.secure is not None and sent.masked else None
    size = " or ".join(_size(sent, content, member, population, plan, word) for content in sent.kinds)
    examples = "metrics of its test" if sent.step_kind == "query" else "losses"
    return f"{sent.field or f'numbers such as {examples}'} ({size}; {plan.policy.how(sent)})"


def _size(
    sent: SentField, content: Sendable, member: Member, population: Population, plan: RunSpec, word: int | None
) -> str:
    if not issubclass(content, TensorBundle):
        return f"one {content.__name__}" if sent.field else content.__name__
    if issubclass(content, Weights):
        state = population.client_model(member).exchanged()
        types = sorted({str(value.dtype).removeprefix("torch.") for value in state.values()})
        size = sum(value.numel() * (word or value.element_size()) for value in state.values()) / 2**20
        return f"{len(state):,} tensors of the model, {'+'.join(types)}, {size:,.2f} MiB"
    if not issubclass(content, Representations):
        of = "of public samples" if issubclass(content, PublicRows) else "named tensors"
        return f"{KIND_KEYS.get(content, content.label)}: {of}, in a size set by the method"
    if (samples := population.public_samples(member.views)) is None:
        return "of the public set, which is missing"
    exchange = getattr(plan.algorithm, "public", None)
    drawn = exchange.samples if isinstance(exchange, PublicExchange) else None
    rows, width, names = min(drawn or len(samples), len(samples)), member.model.dim, list(samples.modalities)
    prefix = "" if sent.field == Representations.label else "representations, "
    size = rows * width * (word or 4) * len(names) / 2**20
    return f"{prefix}{'+'.join(names)}: {rows:,} x {width} float32 each, {size:,.2f} MiB in all"
