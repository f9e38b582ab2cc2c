"""What differential privacy has cost the clients of a run after each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from polyfed.federation.client import ClientInfo
from polyfed.privacy.accounting import PrivacyCost, epsilon_of, releases_within
from polyfed.runs.experiment import Experiment


class Expenses:
    """What the clients of a run have given away, as far as the server can tell: by what it has asked them.

    Args:
        experiment: of the run.
        clients: all that there are.
    """

    def __init__(self, experiment: Experiment, clients: Iterable[ClientInfo]) -> None:
        self._experiment, self._clients = experiment, {client.id: client for client in clients}
        self._policy = experiment.policy
        self._settings = self._policy.privacy
        self.asked: dict[str, dict[str, int]] = {}

    def note(self, step: str, clients: Iterable[str]) -> None:
        if step in self._policy.charged:
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
        info, schema = self._clients[client], self._policy.charged[step]
        group = self._experiment.clients.get(info.group)
        if group is None:  # of DP-SGD its batches are known at its site alone
            return None if self._settings is None else self._settings.cost(schema)
        return self._policy.cost(schema, info.samples, group.training.batch_size)
