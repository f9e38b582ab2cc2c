"""A site of a deployment: what it allows and demands of a run, and the run's clients that it hosts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from polyfed.core.errors import ConfigError, PayloadError, PolyfedError, RefusedError
from polyfed.core.files import write_atomically
from polyfed.core.settings import is_import_path, parse_settings
from polyfed.core.untrusted import read_json
from polyfed.deploy.engines.flower_node import Host, read_spec
from polyfed.deploy.folders import SiteFolder
from polyfed.deploy.settings import ProtectionDemands, SiteConfig, identity_of
from polyfed.engines.outgoing import SiteTerms
from polyfed.engines.run_spec import OF_A_RUN, RunSpec
from polyfed.engines.site import Site
from polyfed.federation.population import Population
from polyfed.privacy.guard import PRIVATE
from polyfed.privacy.policy import SentField
from polyfed.privacy.settings import KIND_KEYS, Budget
from polyfed.runs.config_files import read_config

_log = logging.getLogger(__name__)

_WITH_COMPONENTS = ("algorithm", "server_model", "transport", "privacy", "secure")
"""Parts of a run's spec that name components to import."""


def open_host(spec: str, config: Mapping[str, Any]) -> Host:
    """The site of this node, for the run of a spec.

    Raises:
        PolyfedError: the node names no readable site file, the site does not allow the run, or data or public set do
            not fit.
    """
    path = config.get("config")
    if not isinstance(path, str):
        raise ConfigError('this node was started without its site file; add config="/path/of/site.yaml"')
    return opened_host(Path(path), spec)


@lru_cache(maxsize=1)
def opened_host(site_file: Path, text: str) -> Host:
    config, site_folder = SiteConfig.load(site_file), SiteFolder(site_file.parent)
    torch.set_num_threads(config.run.threads)  # sums of floats depend on it
    require_allowed(text, config)
    spec = read_spec(text)
    demands = config.demands
    exact = demands is not None and demands.plan == "exact"
    announced = Announced(spec, config, read_plan(site_folder, config) if exact else None)
    require_met(announced)
    # named after the plan, whatever a run is called: a server that begins many leaves one
    folder = config.state_dir / f"plan-{sha256(f'{spec.terms} {spec.public_order}'.encode()).hexdigest()[:16]}"
    _log.info("run %s: %s, %d rounds", spec.run, spec.algorithm.component_name(), spec.rounds)
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
            identity=identity_of(site_folder, config) if spec.secure is not None and spec.secure.masks else None,
        ),
    )
    require_met(replace(announced, population=site.federation))
    path, content = folder / "run.json", spec.model_dump_json().encode()
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)
    return Host(config.name, site, [info.id for info in site.infos], config.tracebacks)


# ---- the methods that a site allows


def require_allowed(spec: str, config: SiteConfig) -> None:
    """Check that the site allows the run's method and all components it names, before any of them is imported.

    Raises:
        RefusedError: it does not.
    """
    try:
        # read as plain JSON: validation would import the components
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
    components = _importable([content.get(part) for part in _WITH_COMPONENTS])
    foreign += [f"'{path}'" for path in components if path not in config.algorithms]
    if foreign:
        valid = ", ".join(config.algorithms) or "all methods that polyfed ships"
        raise RefusedError(f"{foreign[0]} is not allowed at site '{config.name}' (algorithms: {valid})")


def _importable(content: object) -> Iterator[str]:
    if isinstance(content, str) and is_import_path(content):
        yield content
    for part in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _importable(part)


def read_plan(site: SiteFolder, config: SiteConfig) -> RunSpec | None:
    """The planned run; None without plan.yaml.

    Raises:
        ConfigError: the file is damaged, or the site does not allow the plan.
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
    """Settings in which a run differs from the plan, single ones with both values; fewer rounds are within the plan."""
    most = plan.model_copy(update={"rounds": min(run.rounds, plan.rounds)})
    own, planned = (spec.model_dump(mode="json", exclude=set(OF_A_RUN)) for spec in (run, most))
    return list(_differences("", own, planned))


def _differences(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            yield from _differences(f"{path}.{key}" if path else key, one.get(key), other.get(key))
    elif one != other:
        is_nested = isinstance(one, Mapping | list) or isinstance(other, Mapping | list)
        yield path if is_nested else f"{path} ({json.dumps(one)}, planned {json.dumps(other)})"


# ---- the demands of a site


@dataclass(frozen=True)
class Announced:
    """A run that a server announces, at a site.

    Attributes:
        spec: Spec of the run.
        config: Settings of the site.
        plan: Planned run; None: there is none, or the site does not demand it.
        population: Clients of the site, once their data are open.
    """

    spec: RunSpec
    config: SiteConfig
    plan: RunSpec | None = None
    population: Population | None = None

    @property
    def demands(self) -> ProtectionDemands:
        return self.config.demanded

    def sent(self) -> Iterator[tuple[SentField, str]]:
        """Fields of the replies to training steps, with the step and method that send them."""
        # replies of untrained clients hold no data; test metrics have a demand of their own
        for sent in self.spec.policy.fields:
            if sent.step_kind == "step":
                yield sent, f"'{sent.step}' of '{self.spec.algorithm.component_name()}'"

    def planned_for_samples(self) -> Iterator[tuple[str, str, float]]:
        """Client, step and epsilon of all planned replies, for training with noise, which depends on the samples."""
        delta, neighbours = self.demands.delta, self.demands.neighbours
        for info in self.population.infos if self.population is not None else ():
            planned = self.spec.policy.planned_training(info.samples, info.batch_size, delta, neighbours)
            yield from ((info.id, step, epsilon) for step, epsilon in planned.items())


@dataclass(frozen=True)
class Demand:
    """A demand of a site on runs.

    Attributes:
        name: Key under ``demands`` in site.yaml.
        value: Value of the key that makes the demand; None: any but null.
        unmet: Yields the ways in which a run does not meet it.
        remedy: Change of the run that meets it.
    """

    name: str
    value: str | bool | None
    unmet: Callable[[Announced], Iterator[str]]
    remedy: str

    def applies(self, demands: ProtectionDemands) -> bool:
        own = getattr(demands, self.name)
        return own is not None if self.value is None else bool(own == self.value)

    def stated(self, demands: ProtectionDemands) -> str:
        """The demand as in site.yaml."""
        own = getattr(demands, self.name)
        shown = f"{own:g} (at delta {demands.delta:g}, over all runs)" if self.name == "max_epsilon" else f"{own}"
        return f"demands.{self.name}: {shown.lower()}"


def _unplanned(run: Announced) -> Iterator[str]:
    if run.plan is None:
        yield "this site has no plan.yaml"
    elif differences := unlike(run.spec, run.plan):
        yield f"the run differs from it in {'; '.join(differences[:5])}"


def _overspent(run: Announced) -> Iterator[str]:
    most, delta = run.demands.max_epsilon, run.demands.delta
    assert most is not None
    if run.spec.privacy is None:
        yield "the run has no 'privacy'"
    epsilons = [("each client", run.spec.policy.planned(delta))]
    epsilons += [(f"'{client}'", epsilon) for client, _, epsilon in run.planned_for_samples()]
    for client, epsilon in epsilons:
        if epsilon > most * (1 + 1e-6):
            yield f"in {run.spec.rounds} rounds of the run {client} would spend epsilon {epsilon:.3g}"


def _narrow(run: Announced) -> Iterator[str]:
    least, secure = run.demands.smallest_range, run.spec.secure
    if least is not None and secure is not None and secure.range < least:
        yield f"aggregation.secure.range is {secure.range:g}: a reply that is refused for its size reveals a part of it"


def _measured(run: Announced) -> Iterator[str]:
    if run.spec.evaluates:
        yield "the run asks for test metrics"


def _alone(run: Announced) -> Iterator[str]:
    for sent, sender in run.sent():
        if not sent.masked:
            field = f"'{sent.field}'" if sent.field else "numbers such as losses"
            yield f"{sender} sends {field} alone"


def _sending(key: str, is_met: Callable[[SentField], bool], run: Announced) -> Iterator[str]:
    for sent, sender in run.sent():
        if not is_met(sent) and key in (KIND_KEYS.get(tensors) for tensors in sent.tensors):
            yield f"{sender} sends {key}"


_MASKS = "set aggregation.secure: pairwise_masks, with a method whose replies can be summed"
_TENSORS: dict[str, tuple[Callable[[SentField], bool], str]] = {
    "never": (lambda sent: False, "choose another method"),
    "protected": (lambda sent: sent.noisy, "add 'privacy' for these"),
    "summed": (lambda sent: sent.masked, _MASKS),
}
"""Values of the demand on a type of tensors."""

DEMANDS = (
    Demand("plan", "exact", _unplanned, "agree on a new plan.yaml, or run the planned one"),
    Demand("max_epsilon", None, _overspent, "add 'privacy', raise its noise or lower its rounds"),
    Demand("smallest_range", None, _narrow, "raise aggregation.secure.range"),
    Demand("metrics", False, _measured, "set run.evaluate_clients: false (and privacy.metrics: none)"),
    Demand("sums", "only", _alone, _MASKS),
    *(
        Demand(key, value, partial(_sending, key, is_met), remedy)
        for key in KIND_KEYS.values()
        for value, (is_met, remedy) in _TENSORS.items()
    ),
)
"""All demands that a site can make."""


def demands_of(config: SiteConfig) -> list[Demand]:
    """Demands in force at a site."""
    return [] if config.demands is None else [demand for demand in DEMANDS if demand.applies(config.demands)]


def require_met(run: Announced) -> None:
    """Check that a run meets the demands of a site.

    Raises:
        RefusedError: it does not; the message names the demand, the difference and the remedy.
    """
    for demand in demands_of(run.config):
        for difference in demand.unmet(run):
            raise RefusedError(
                f"site '{run.config.name}' has {demand.stated(run.demands)}, but {difference}; {demand.remedy}"
            )
