"""What can be known of differential privacy before a run begins, and what it has cost after each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyfed.core.errors import ConfigError
from polyfed.engines.engine import Hosting
from polyfed.federation.accounting import accounting, epsilon_of, releases_within
from polyfed.federation.privacy import PrivacySettings, planned_epsilon, protected_steps, require_covered
from polyfed.federation.privacy_guard import PRIVATE, PrivacyGuard
from polyfed.runs.experiment import Experiment
from polyfed.wire.schema import steps_of


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
    settings = resolved_privacy(experiment)
    if settings is None or not protected_steps(settings, steps_of(experiment.algorithm)):
        raise ConfigError(f"privacy has no effect: clients of '{method}' send nothing to protect; leave it out")
    _require_budget(experiment)


def plan(experiment: Experiment) -> float | None:
    """Planned epsilon of each client, at the budget's delta; None without privacy."""
    settings = resolved_privacy(experiment)
    if settings is None:
        return None
    return planned_epsilon(settings, steps_of(experiment.algorithm), experiment.run.rounds, settings.budget.delta)


def _require_budget(experiment: Experiment) -> None:
    settings, run = resolved_privacy(experiment), experiment.run
    assert settings is not None
    budget, planned = settings.budget, plan(experiment)
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
        self._settings = resolved_privacy(experiment)
        self._steps = protected_steps(self._settings, steps_of(experiment.algorithm)) if self._settings else {}
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
        largest = 0.0
        for client in sorted(self.asked):
            epsilon, replies = self._of(client)
            largest = max(largest, epsilon)
            tell(client, {"epsilon": epsilon, "replies": float(replies)})
        tell(server, {"epsilon": largest})

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
