"""FedAvg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from polyfed.aggregation.averagings.tensors import ByType
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
from polyfed.algorithms.shared.moves import MovesObserver
from polyfed.federation.filters import Ask, Filter


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), of one global model for each type of clients.

    Clients of one architecture, task and classes are a type; their weights are averaged by sample count.

    >>> method = FedAvg(local_epochs=1)
    >>> method.averaging.component_name()
    'by_type'
    """

    takes_late_replies: ClassVar[bool] = True
    has_global_models: ClassVar[bool] = True
    learns_by_fit: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: WeightAveraging = ByType()

    # ---- server half

    def setup(self, server: Server) -> None:
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """w <- sum_k n_k w_k / sum_k n_k, over the clients of each type (Algorithm 1, server)."""
        means = server.new_means(self.averaging, cohort)
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):  # w_k <- ClientUpdate(k, w)
            means[reply.type].add(reply.weights, reply.num_examples)
        server.update_weights(server.averaged(self.averaging, means))  # w <- sum_k n_k / n w_k

    def observers(self, server: Server) -> Sequence[Filter[Ask]]:
        is_mean = self.averaging.mean == "exact" and not self.averaging.crosses_types
        return (MovesObserver(server, compared=not is_mean),)

    # ---- client half

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """ClientUpdate of Algorithm 1: train the received model on the client's own task."""
        client.load_weights(weights)
        # for each local epoch and batch: w <- w - eta grad l(w; b)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights, num_examples=client.num_examples)
