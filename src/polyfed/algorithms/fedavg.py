"""FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polyfed.aggregation.averaging import ByType
from polyfed.algorithms.algorithm import Algorithm, Client, Cohort, Reply, Server, Weights, client_step, each
from polyfed.algorithms.shared.global_models import (
    LocalEpochs,
    LocalSteps,
    WeightAveraging,
    average,
    start_averaging,
    weights_check,
)


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), of one global model for each type of clients.

    Clients of one architecture, task and classes are a type; their weights are averaged by sample count.
    """

    has_global_models: ClassVar[bool] = True
    learns_by_fit: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: WeightAveraging = ByType()

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": "num_examples"}

    # ---- server half

    def setup(self, server: Server) -> None:
        start_averaging(server, self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average: w <- sum_k n_k w_k / sum_k n_k."""
        replies = cohort.ask(self.fit, check=weights_check(server), weights=each(server.weights_for))
        average(server, cohort, replies, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the client's own task."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=Weights(client.model.exchanged()), num_examples=client.num_examples)
