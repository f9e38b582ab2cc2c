"""What can be known of differential privacy before a run begins, and what it has cost after each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyfed.algorithms.algorithm import Algorithm, LocalTraining
from polyfed.core.errors import ConfigError
from polyfed.engines.engine import Hosting
from polyfed.federation.client import ClientInfo
from polyfed.federation.population import Population
from polyfed.privacy.accounting import PrivacyCost, accounting, epsilon_of, releases_within
from polyfed.privacy.guard import PRIVATE, PrivacyGuard
from polyfed.privacy.private_training import opacus_optimizers, require_per_sample, training_cost
from polyfed.privacy.settings import PrivacySettings, planned_epsilon, protected_steps, require_covered
from polyfed.runs.experiment import Experiment
from polyfed.wire.schema import StepSchema, steps_of


def resolved_privacy(experiment: Experiment) -> PrivacySettings | None:
    if experiment.privacy is None:
        return None
    return experiment.privacy.resolved(steps_of(experiment.algorithm), experiment.run.rounds)


def require_private(experiment: Experiment) -> None:
    """Check that all that clients send is protected.

    Raises:
        ConfigError: something is not, or a package is not installed.
    """
    settings = resolved_privacy(experiment)
    if settings is None:
        return
    accounting()
    method, steps = experiment.algorithm, steps_of(experiment.algorithm)
    require_covered(settings, steps, method.component_name())
    if settings.samples is not None:
        opacus_optimizers()
        require_learning_by_fit(type(method))
    if settings.metrics == "none" and experiment.run.evaluate_clients is not False:
        raise ConfigError(
            "run.evaluate_clients: metrics of clients' test samples are sent as they are, which privacy does not "
            "cover; set run.evaluate_clients: false, or accept it with privacy.metrics: clear"
        )
    if not protected_steps(settings, steps):
        raise ConfigError(
            f"privacy has no effect: clients of '{method.component_name()}' send nothing to protect; leave it out"
        )


def require_learning_by_fit(method: type[Algorithm]) -> None:
    """Check that DP-SGD sees all that clients of a method learn of private data.

    Raises:
        ConfigError: nobody has vouched for that.
    """
    # what derives from a class that does may do more
    if not vars(method).get("learns_by_fit"):
        raise ConfigError(
            f"privacy.samples: clients of '{method.component_name()}' may learn of private data beside client.fit, "
            "which DP-SGD does not see; choose fedavg, fedet or fedmkd, or protect the reply (privacy.reply)"
        )


def require_affordable(experiment: Experiment, federation: Population) -> None:
    """Check that planned rounds are within the budget, and that DP-SGD suits tasks and models of simulated clients.

    Raises:
        ConfigError: they are not, or it does not.
    """
    settings = resolved_privacy(experiment)
    if settings is None:
        return
    if settings.samples is not None:
        for member in {info.architecture: federation.members[info.id] for info in federation.infos}.values():
            require_per_sample(member.settings.task, federation.client_model(member), member.id)
    budget, run = settings.budget, experiment.run
    # who is drawn for some rounds may stay within; who is asked in all of them does not
    if budget.epsilon is None or run.sampling.cohort is not None:
        return
    for info in federation.infos:
        planned = plan(experiment, info)
        if planned is not None and planned > budget.epsilon * (1 + 1e-6):
            raise ConfigError(
                f"privacy.budget.epsilon is {budget.epsilon:g}, but {settings.planned_releases(run.rounds)} replies of "
                f"'{info.id}' cost epsilon {planned:.3g} at delta {budget.delta:g}; lower run.rounds, or raise the "
                "budget or noise_multiplier (that of privacy.reply may be left out: it follows from the budget)"
            )


def plan(experiment: Experiment, client: ClientInfo) -> float | None:
    """Planned epsilon of a client with one protected reply a round, at the budget's delta; None if nobody can tell."""
    settings, steps = resolved_privacy(experiment), steps_of(experiment.algorithm)
    if settings is None:
        return None
    if settings.samples is None:
        return planned_epsilon(settings, steps, experiment.run.rounds, settings.budget.delta)
    cost = client_cost(experiment, settings, client, next(iter(protected_steps(settings, steps).values())))
    number = settings.planned_releases(experiment.run.rounds)
    return None if cost is None else epsilon_of([cost] * number, settings.budget.delta, settings.neighbours)


def client_cost(
    experiment: Experiment, settings: PrivacySettings, client: ClientInfo, schema: StepSchema
) -> PrivacyCost | None:
    """What a client's reply to a step costs; None if its batches are known at its site alone."""
    if settings.samples is None:
        return settings.cost(schema)
    group = experiment.clients.get(client.group)
    if group is None:
        return None
    local = experiment.algorithm.local_training or LocalTraining()
    return training_cost(settings.samples, client.samples, group.training.batch_size, local.epochs, local.steps)


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
        clients: all that there are.
    """

    def __init__(self, experiment: Experiment, clients: Iterable[ClientInfo]) -> None:
        self._experiment, self._clients = experiment, {client.id: client for client in clients}
        self._settings = resolved_privacy(experiment)
        self._steps = protected_steps(self._settings, steps_of(experiment.algorithm)) if self._settings else {}
        self.asked: dict[str, dict[str, int]] = {}

    def note(self, step: str, clients: Iterable[str]) -> None:
        if step in self._steps:
            for client in clients:
                counts = self.asked.setdefault(client, {})
                counts[step] = counts.get(step, 0) + 1

    def tell(self, tell: Callable[[str, dict[str, float]], Any], server: str) -> None:
        """Epsilon of each client that was ever asked, and of the federation: that of the client with most."""
        if self._settings is None or not self.asked:
            return
        largest, budget = 0.0, self._settings.budget
        for client in sorted(self.asked):
            costs = self._costs(client)
            if not costs:
                continue
            epsilon, replies = epsilon_of(costs, budget.delta, self._settings.neighbours), len(costs)
            largest = max(largest, epsilon)
            tell(client, {"epsilon": epsilon, "replies": float(replies)})
        if largest:
            tell(server, {"epsilon": largest})

    def _costs(self, client: str) -> list[PrivacyCost]:
        assert self._settings is not None
        costs = [
            cost
            for step, count in sorted(self.asked[client].items())
            for cost in [self._cost(client, step)] * count
            if cost is not None
        ]
        budget = self._settings.budget
        if budget.epsilon is not None and len(set(costs)) == 1:  # what is asked beyond the budget is refused
            most = releases_within(costs[0], budget.epsilon, budget.delta, len(costs), self._settings.neighbours)
            return costs[:most]
        return costs

    def _cost(self, client: str, step: str) -> PrivacyCost | None:
        assert self._settings is not None
        return client_cost(self._experiment, self._settings, self._clients[client], self._steps[step])
