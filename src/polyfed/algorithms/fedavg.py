"""FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polyfed.aggregation.averagings.by_type import ByType
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_step,
    each,
)


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), of one global model for each type of clients.

    Clients of one architecture, task and classes are a type; their weights are averaged by sample count.
    """

    takes_late_replies: ClassVar[bool] = True
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
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average: w <- sum_k n_k w_k / sum_k n_k."""
        replies = cohort.ask(self.fit, check=server.weights_check(), weights=each(server.weights_for))
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the client's own task."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights, num_examples=client.num_examples)
