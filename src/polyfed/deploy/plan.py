"""What the people of a federation plan to run, as each site has it on paper: ``plan.yaml``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from polyfed.core.errors import ConfigError, PolyfedError, RefusedError
from polyfed.core.settings import parse_settings
from polyfed.deploy.demands import require_allowed
from polyfed.deploy.files import SiteFolder
from polyfed.deploy.settings import SiteConfig
from polyfed.engines.run_spec import OF_A_RUN, RunSpec
from polyfed.runs.config_files import read_config


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
