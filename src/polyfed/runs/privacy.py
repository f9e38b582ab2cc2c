"""What can be known of differential privacy before a run begins, and what it has cost after each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.engines.engine import Hosting
from polyfed.federation.accounting import accounting, epsilon_of, releases_within
from polyfed.federation.privacy import PrivacySettings, require_covered
from polyfed.federation.privacy_guard import PRIVATE, PrivacyGuard
from polyfed.runs.experiment import Experiment
from polyfed.wire.schema import StepSchema, steps_of

PRIVACY = "privacy"
"""Kind of the measurements of what privacy has cost: epsilon, delta, and replies."""


def protected_steps(experiment: Experiment) -> Mapping[str, StepSchema]:
    """Steps of the method whose replies are protected, and cost budget."""
    steps = steps_of(experiment.algorithm).items()
    settings = resolved_privacy(experiment)
    return {name: schema for name, schema in steps if schema.kind == "step" and settings and settings.cost(schema)}


def resolved_privacy(experiment: Experiment) -> PrivacySettings | None:
    """Privacy as sites get it, with its noise."""
    if experiment.privacy is None:
        return None
    return experiment.privacy.resolved(steps_of(experiment.algorithm), experiment.run.rounds)


def require_private(experiment: Experiment) -> None:
    """Check that all that clients send is protected, and that planned rounds are within the budget.

    Raises:
        ConfigError: something is not, they are not, or the accountant is not installed.
    """
    if experiment.privacy is None:
        return
    accounting()
    method = experiment.algorithm.component_name()
    require_covered(experiment.privacy, steps_of(experiment.algorithm), method)
    if experiment.privacy.metrics == "none" and experiment.run.evaluate_clients is not False:
        raise ConfigError(
            "run.evaluate_clients: metrics of clients' test samples are sent as they are, which privacy does not "
            "cover; set run.evaluate_clients: false, or accept it with privacy.metrics: clear"
        )
    if not protected_steps(experiment):
        raise ConfigError(f"privacy has no effect: clients of '{method}' send nothing to protect; leave it out")
    _require_budget(experiment)


def planned_epsilon(experiment: Experiment) -> float | None:
    """Epsilon of a client that takes part in each round with one protected reply; None without privacy."""
    settings = resolved_privacy(experiment)
    if settings is None:
        return None
    costs = [settings.cost(schema) for schema in protected_steps(experiment).values()]
    least = max((cost.noise for cost in costs if cost), default=0.0)
    cheapest = next(cost for cost in costs if cost and cost.noise == least)
    return epsilon_of([cheapest] * settings.planned_releases(experiment.run.rounds), settings.budget.delta)


def _require_budget(experiment: Experiment) -> None:
    settings, run = resolved_privacy(experiment), experiment.run
    assert settings is not None
    budget, planned = settings.budget, planned_epsilon(experiment)
    # who is drawn for some rounds may stay within; who is asked in all of them does not
    if budget.epsilon is None or planned is None or run.sampling.cohort is not None:
        return
    if planned > budget.epsilon * (1 + 1e-6):
        noise = settings.reply.noise_multiplier
        raise ConfigError(
            f"privacy.budget.epsilon is {budget.epsilon:g}, but {settings.planned_releases(run.rounds)} replies of a "
            f"client at noise_multiplier {noise:g} cost epsilon {planned:.3g} at delta {budget.delta:g}; lower "
            "run.rounds, or raise privacy.reply.noise_multiplier (left out, it follows from the budget) or the budget"
        )


def prepare_secret(hosting: Hosting) -> None:
    """Read or make the secret of a simulation before its processes begin.

    Raises:
        ConfigError: it cannot be read.
    """
    if hosting.spec.privacy is not None and hosting.federation.members:
        PrivacyGuard(hosting.spec.privacy, hosting.folder / PRIVATE, hosting.settings.secret).prepare()


class Expenses:
    """What the clients of a run have given away, as far as the server can tell: by what it has asked them.

    Args:
        experiment: of the run.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._steps = protected_steps(experiment)
        self._settings = resolved_privacy(experiment)
        self.asked: dict[str, dict[str, int]] = {}

    def note(self, step: str, clients: Iterable[str]) -> None:
        """Clients are asked for a reply."""
        if step in self._steps:
            for client in clients:
                counts = self.asked.setdefault(client, {})
                counts[step] = counts.get(step, 0) + 1

    def tell(self, tell: Callable[[str, dict[str, float]], Any], server: str) -> None:
        """Epsilon of each client that was ever asked, and of the federation: that of the client with most."""
        if self._settings is None or not self.asked:
            return
        budget, largest = self._settings.budget, 0.0
        for client in sorted(self.asked):
            epsilon, replies = self._of(client)
            largest = max(largest, epsilon)
            tell(client, {"epsilon": epsilon, "delta": budget.delta, "replies": float(replies)})
        tell(server, {"epsilon": largest, "delta": budget.delta})

    def _of(self, client: str) -> tuple[float, int]:
        assert self._settings is not None
        costs = [
            cost
            for step, count in sorted(self.asked[client].items())
            for cost in [self._settings.cost(self._steps[step])] * count
            if cost is not None
        ]
        budget = self._settings.budget
        if budget.epsilon is not None and len(set(costs)) == 1:  # what is asked beyond the budget is refused
            costs = costs[: releases_within(costs[0], budget.epsilon, budget.delta, len(costs))]
        return epsilon_of(costs, budget.delta), len(costs)
