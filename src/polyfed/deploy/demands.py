"""What a site demands of the protection of a run before its clients take part, and what it has given away so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from polyfed.core.errors import DataError, PayloadError
from polyfed.deploy.findings import Finding
from polyfed.deploy.settings import ProtectionDemands, SiteConfig
from polyfed.engines.run_spec import RunSpec
from polyfed.federation.accounting import epsilon_of, fits
from polyfed.federation.privacy import KIND_KEYS, planned_epsilon, protected_steps
from polyfed.federation.privacy_guard import PRIVATE
from polyfed.federation.spending import SpendingLedger
from polyfed.runs.disclosure import SentField, sent_fields
from polyfed.wire.schema import steps_of

_MASKED = "set aggregation.secure: pairwise_masks, with a method whose replies can be summed"


def require_protection(spec: RunSpec, config: SiteConfig) -> None:
    """Check that a run protects what leaves as much as the site demands.

    Raises:
        PayloadError: it does not; the message names the demand, its value, and what would meet it.
    """
    for missing in () if config.demands is None else _missing(spec, config.demands):
        raise PayloadError(f"site '{config.name}' demands {missing}")


def _missing(spec: RunSpec, demands: ProtectionDemands) -> Iterator[str]:
    """What a run lacks, in words."""
    yield from _too_much(spec, demands)
    if spec.evaluates and not demands.metrics:
        yield (
            "that no test metrics leave it as they are (demands.metrics: false); set run.evaluate_clients: false "
            "(and privacy.metrics: none)"
        )
    for sent in sent_fields(spec.algorithm, spec.secure, spec.privacy):
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
    planned = planned_epsilon(spec.privacy, steps_of(spec.algorithm), spec.rounds, demands.delta)
    if planned > most * (1 + 1e-6):
        yield (
            f"at most epsilon {most:g} at delta {demands.delta:g} (demands.max_epsilon), and "
            f"{spec.rounds} rounds of the run would give away {planned:.3g}; raise its noise or lower its rounds"
        )


def _missing_of(sent: SentField, spec: RunSpec, demands: ProtectionDemands) -> Iterator[str]:
    """What a field of a reply lacks."""
    where = f"'{sent.step}' of '{_name(spec)}'"
    if demands.sums == "only" and not sent.masked:
        what = f"'{sent.field}'" if sent.field else "numbers such as losses"
        yield f"that replies leave in masked sums only (demands.sums: only), and {where} sends {what} alone; {_MASKED}"
    for kind in sent.tensors:
        wanted = getattr(demands, KIND_KEYS[kind]) if kind in KIND_KEYS else "allowed"
        key = f"demands.{KIND_KEYS.get(kind, kind.kind)}: {wanted}"
        if wanted == "never":
            yield f"that no {KIND_KEYS[kind]} leave it ({key}), and {where} sends them; choose another method"
        elif wanted == "protected" and not sent.noisy:
            yield f"that {KIND_KEYS[kind]} leave with differential privacy only ({key}), from {where} too; add 'privacy'"
        elif wanted == "summed" and not sent.masked:
            yield f"that {KIND_KEYS[kind]} leave in masked sums only ({key}), from {where} too; {_MASKED}"


def _name(spec: RunSpec) -> str:
    return spec.algorithm.component_name()


# ---- what deploy check says


def check_protection(config: SiteConfig) -> Iterator[Finding]:
    """The site's demands, the protection of each run that was announced here, and what each client has given away."""
    demands = config.demands
    if demands is None:
        detail = "none: replies may leave without noise (demands: {max_epsilon: ...} in site.yaml would refuse that)"
        yield Finding("ok", "demands", detail)
    else:
        limit = "any epsilon" if demands.max_epsilon is None else f"epsilon {demands.max_epsilon:g} at most"
        metrics = "as they are" if demands.metrics else "never in protected runs"
        detail = f"{limit} at delta {demands.delta:g} over all runs, weights {demands.weights}, test metrics {metrics}"
        yield Finding("ok", "demands", detail)
    for path in sorted(config.state_dir.glob("*/run.json")):
        yield _announced(path, 1e-5 if demands is None else demands.delta)
    for path in sorted((config.state_dir / PRIVATE).glob("*.jsonl")):
        yield _spent(path, config)


def _announced(path: Path, delta: float) -> Finding:
    spec = RunSpec.model_validate_json(path.read_bytes())
    what, method = f"protection in {spec.run}", _name(spec)
    if spec.privacy is None:
        return Finding("ok", what, f"none: replies of '{method}' leave as they are")
    steps = steps_of(spec.algorithm)
    leaving = ", ".join(protected_steps(spec.privacy, steps))
    if spec.privacy.reply is None:
        assert spec.privacy.samples is not None
        noise = f"DP-SGD, gradients clipped to norm {spec.privacy.samples.clip:g}"
        noise += (
            f", noise multiplier {spec.privacy.samples.noise_multiplier:g}; epsilon depends on each client's samples"
        )
        return Finding("ok", what, f"{leaving} of '{method}': {noise}")
    clips = ", ".join(f"{kind.kind} clipped to norm {clip:g}" for kind, clip in spec.privacy.reply.clips.items())
    planned = planned_epsilon(spec.privacy, steps, spec.rounds, delta)
    return Finding(
        "ok",
        what,
        f"{leaving} of '{method}': {clips}; noise multiplier {spec.privacy.reply.noise_multiplier:.3g}; planned "
        f"epsilon {planned:.3g} at delta {delta:g} in {spec.privacy.planned_releases(spec.rounds)} replies",
    )


def _spent(path: Path, config: SiteConfig) -> Finding:
    what = f"given away by {path.stem}"
    try:
        costs = [release.cost for release in SpendingLedger(path).releases()]
    except DataError as error:
        return Finding("error", what, str(error))
    demands = config.demands
    delta = 1e-5 if demands is None else demands.delta
    detail = f"epsilon {epsilon_of(costs, delta):.3g} at delta {delta:g} in {len(costs)} replies"
    if demands is not None and demands.max_epsilon is not None:
        over = not fits(costs, demands.max_epsilon, delta)
        return Finding("error" if over else "ok", what, f"{detail}, of {demands.max_epsilon:g}")
    return Finding("ok", what, detail)
