"""What ``polyfed deploy check`` says of protection: demands, plan, announced runs, what was given away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polyfed.core.errors import ConfigError, DataError, PayloadError
from polyfed.core.secret import read_secret
from polyfed.deploy.demands import planned_for_samples, require_affordable_here, require_protection
from polyfed.deploy.findings import Finding
from polyfed.deploy.plan import unlike
from polyfed.deploy.settings import ProtectionDemands, SiteConfig
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.population import Population
from polyfed.privacy.accounting import between_sets, epsilon_of, fits
from polyfed.privacy.guard import PRIVATE, ledger_at
from polyfed.privacy.settings import KIND_KEYS


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
        return Finding(
            "error", "plan and demands", f"the planned run would be refused: {error}", "agree on another plan"
        )
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
