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
from polyfed.deploy.demands import require_affordable_here, require_allowed, require_planned, require_protection
from polyfed.deploy.engines.flower_node import Host, read_spec
from polyfed.deploy.files import SiteFolder
from polyfed.deploy.settings import SiteConfig
from polyfed.engines.leaving import SiteTerms
from polyfed.engines.run_spec import RunSpec
from polyfed.engines.site import Site
from polyfed.privacy.guard import PRIVATE
from polyfed.privacy.settings import Budget

if TYPE_CHECKING:  # takes cryptography, which most runs do without
    from polyfed.privacy.masking.party import SiteIdentity

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
