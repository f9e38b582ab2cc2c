"""What a node of a real federation hosts: what its ``site.yaml`` describes, within what the site allows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyfed.core.errors import ConfigError
from polyfed.core.files import write_atomically
from polyfed.deploy.engines.flower_node import Host, read_spec
from polyfed.deploy.folders import SiteFolder
from polyfed.deploy.settings import SiteConfig
from polyfed.engines.outgoing import SiteTerms
from polyfed.engines.run_spec import RunSpec
from polyfed.engines.site import Site
from polyfed.privacy.guard import PRIVATE
from polyfed.privacy.settings import Budget

if TYPE_CHECKING:  # takes cryptography, which most runs do without
    from polyfed.privacy.masking.party import SiteIdentity
import json
from collections.abc import Iterator

from polyfed.core.errors import PayloadError, PolyfedError, RefusedError
from polyfed.core.settings import is_import_path, parse_settings
from polyfed.core.untrusted import read_json
from polyfed.deploy.settings import ProtectionDemands
from polyfed.engines.run_spec import OF_A_RUN
from polyfed.federation.population import Population
from polyfed.privacy.accounting import Neighbours
from polyfed.privacy.policy import SentField
from polyfed.privacy.settings import KIND_KEYS
from polyfed.runs.config_files import read_config

_WITH_COMPONENTS = ("algorithm", "server_model", "transport", "privacy", "secure")
"""Parts of a run's spec that name what is imported."""
_MASKED = "set aggregation.secure: pairwise_masks, with a method whose replies can be summed"


def require_allowed(spec: str, config: SiteConfig) -> None:
    """Check, before anything of it is imported, that the site allows the run's method and all components it names.

    Raises:
        RefusedError: it does not.
    """
    try:
        # read as plain JSON: to validate it would import what it names
        content = read_json(spec)
        name = str(content["algorithm"]["name"])
    except (PayloadError, KeyError, TypeError) as error:
        raise RefusedError(f"damaged message: the run's spec: {error}") from error
    if content.get("attackers"):
        raise RefusedError(
            f"the run asks clients of site '{config.name}' to attack (run.attackers), which no site does; leave it out"
        )
    allowed = name in config.algorithms if config.algorithms else "." not in name
    foreign = [] if allowed else [f"method '{name}'"]
    for path in _importable([content.get(part) for part in _WITH_COMPONENTS]):
        if path not in config.algorithms:
            foreign.append(f"'{path}'")
    if foreign:
        valid = ", ".join(config.algorithms) or "all methods that polyfed ships"
        raise RefusedError(f"{foreign[0]} is not allowed at site '{config.name}' (algorithms: {valid})")


def _importable(content: object) -> Iterator[str]:
    if isinstance(content, str) and is_import_path(content):
        yield content
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for part in parts:
        yield from _importable(part)


def require_protection(spec: RunSpec, config: SiteConfig) -> None:
    """Check that a run protects what leaves as much as the site demands.

    Raises:
        RefusedError: it does not; the message names the demand, its value, and what would meet it.
    """
    for missing in () if config.demands is None else _missing(spec, config.demands):
        raise RefusedError(f"site '{config.name}' demands {missing}")


def planned_for_samples(
    spec: RunSpec, population: Population, delta: float, neighbours: Neighbours
) -> Iterator[tuple[str, str, float]]:
    """Client, step and epsilon of all its planned replies, of a run that trains with noise: it depends on samples."""
    for info in population.infos:
        for step, epsilon in spec.policy.planned_training(info.samples, info.batch_size, delta, neighbours).items():
            yield info.id, step, epsilon


def require_affordable_here(spec: RunSpec, config: SiteConfig, population: Population) -> None:
    """Check that no client of a site would give away more than the site allows, with as many samples as it has.

    Raises:
        RefusedError: one would.
    """
    demands = config.demands
    if demands is None or demands.max_epsilon is None:
        return
    for client, _, planned in planned_for_samples(spec, population, demands.delta, demands.neighbours):
        if planned > demands.max_epsilon * (1 + 1e-6):
            raise RefusedError(
                f"site '{config.name}' demands at most epsilon {demands.max_epsilon:g} at delta {demands.delta:g} "
                f"(demands.max_epsilon), and {spec.rounds} rounds of the run would have '{client}' give away "
                f"{planned:.3g}; raise its noise or lower its rounds"
            )


def _missing(spec: RunSpec, demands: ProtectionDemands) -> Iterator[str]:
    """What a run lacks, in words."""
    yield from _too_much(spec, demands)
    if demands.smallest_range is not None and spec.secure is not None and spec.secure.range < demands.smallest_range:
        yield (
            f"a range of {demands.smallest_range:g} at least in masked sums (demands.smallest_range), as a reply that "
            f"is refused for its size tells something of it, and aggregation.secure.range is {spec.secure.range:g}"
        )
    if spec.evaluates and not demands.metrics:
        yield (
            "that no test metrics leave it as they are (demands.metrics: false); set run.evaluate_clients: false "
            "(and privacy.metrics: none)"
        )
    for sent in spec.policy.fields:
        # what untrained clients tell is of no data; test metrics are above
        if sent.step_kind == "step":
            yield from _missing_of(sent, spec, demands)


def _too_much(spec: RunSpec, demands: ProtectionDemands) -> Iterator[str]:
    most = demands.max_epsilon
    if most is None:
        return
    if spec.privacy is None:
        yield f"epsilon {most:g} at most (demands.max_epsilon); add 'privacy'"
        return
    planned = spec.policy.planned(demands.delta)
    if planned > most * (1 + 1e-6):
        yield (
            f"at most epsilon {most:g} at delta {demands.delta:g} (demands.max_epsilon), and "
            f"{spec.rounds} rounds of the run would give away {planned:.3g}; raise its noise or lower its rounds"
        )


def _missing_of(sent: SentField, spec: RunSpec, demands: ProtectionDemands) -> Iterator[str]:
    """What a field of a reply lacks."""
    where = f"'{sent.step}' of '{spec.algorithm.component_name()}'"
    if demands.sums == "only" and not sent.masked:
        what = f"'{sent.field}'" if sent.field else "numbers such as losses"
        yield f"that replies leave in masked sums only (demands.sums: only), and {where} sends {what} alone; {_MASKED}"
    unmet = {
        "never": (True, "that no {} leave it ({}), and {} sends them; choose another method"),
        "protected": (not sent.noisy, "that {} leave with differential privacy only ({}), from {}; add 'privacy'"),
        "summed": (not sent.masked, f"that {{}} leave in masked sums only ({{}}), from {{}} too; {_MASKED}"),
    }
    for key in (KIND_KEYS[kind] for kind in sent.tensors if kind in KIND_KEYS):
        wanted = getattr(demands, key)
        lacks, message = unmet.get(wanted, (False, ""))
        if lacks:
            yield message.format(key, f"demands.{key}: {wanted}", where)


def read_plan(site: SiteFolder, config: SiteConfig) -> RunSpec | None:
    """The planned run; None: nobody wrote it down.

    Raises:
        ConfigError: the file is damaged, or the site does not allow what is planned.
    """
    if not site.plan.is_file():
        return None
    content = read_config(site.plan)
    try:
        require_allowed(json.dumps(content), config)
        return parse_settings(RunSpec, content)
    except (PolyfedError, TypeError) as error:
        raise ConfigError(f"{site.plan}: {error}") from error


def unlike(run: RunSpec, plan: RunSpec) -> list[str]:
    """In what a run is not as planned; of single values with both. Fewer rounds are within the plan."""
    most = plan.model_copy(update={"rounds": min(run.rounds, plan.rounds)})
    own, planned = (spec.model_dump(mode="json", exclude=set(OF_A_RUN)) for spec in (run, most))
    return list(_differences("", own, planned))


def require_planned(run: RunSpec, site: SiteFolder, config: SiteConfig) -> None:
    """Check that a run is the planned one, where the site demands it.

    Raises:
        ConfigError: the plan is damaged.
        RefusedError: the run is another, or nobody wrote a plan down.
    """
    if config.demands is None or config.demands.plan == "any":
        return
    if (plan := read_plan(site, config)) is None:
        raise RefusedError(f"site '{config.name}' demands the planned run (demands.plan: exact) and has no plan.yaml")
    if differences := unlike(run, plan):
        raise RefusedError(
            f"site '{config.name}' demands the planned run (demands.plan: exact), and this one is another in "
            f"{'; '.join(differences[:5])}; agree on a new plan.yaml, or run what is planned"
        )


def _differences(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(f"{path}.{key}" if path else key, one.get(key), other.get(key))
    elif one != other:
        is_nested = isinstance(one, Mapping | list) or isinstance(other, Mapping | list)
        yield path if is_nested else f"{path} ({json.dumps(one)}, planned {json.dumps(other)})"


_log = logging.getLogger(__name__)


def open_host(spec: str, config: Mapping[str, Any]) -> Host:
    """The site of this node, for the run of a spec.

    Raises:
        PolyfedError: the node names no readable site file, the run asks for what the site does not allow, or data or
            public set do not fit.
    """
    path = config.get("config")
    if not isinstance(path, str):
        raise ConfigError('this node was started without its site file; add config="/path/of/site.yaml"')
    return opened_host(Path(path), spec)


@lru_cache(maxsize=1)
def opened_host(site_file: Path, text: str) -> Host:
    config = SiteConfig.load(site_file)
    torch.set_num_threads(config.run.threads)  # sums of floats depend on it
    require_allowed(text, config)
    spec = read_spec(text)
    require_protection(spec, config)
    require_planned(spec, SiteFolder(site_file.parent), config)
    # of the plan, whatever a run is called: a server that begins many leaves one
    folder = config.state_dir / f"plan-{sha256(f'{spec.terms} {spec.public_order}'.encode()).hexdigest()[:16]}"
    path, announced = folder / "run.json", spec.model_dump_json().encode()
    _log.info("run %s: %s, %d rounds", spec.run, spec.algorithm.component_name(), spec.rounds)
    demands = config.demands
    site = Site.open(
        config,
        spec,
        folder / "clients",
        vocabulary=folder / "vocabulary",
        limits=config.limits,
        terms=SiteTerms(
            private=config.state_dir / PRIVATE,
            budget=None if demands is None else Budget(epsilon=demands.max_epsilon, delta=demands.delta),
            neighbours="replace" if demands is None else demands.neighbours,
            measures=demands is None or demands.metrics,
            identity=_identity(SiteFolder(site_file.parent), config, spec),
        ),
    )
    require_affordable_here(spec, config, site.federation)
    if not path.is_file() or path.read_bytes() != announced:
        write_atomically(path, announced)
    return Host(config.name, site, [info.id for info in site.infos], config.tracebacks)


def _identity(folder: SiteFolder, config: SiteConfig, spec: RunSpec) -> SiteIdentity | None:
    """What signs keys of masked sums; other runs need none."""
    if spec.secure is None or not spec.secure.masks:
        return None
    from polyfed.deploy.roster import identity_of

    return identity_of(folder, config)
