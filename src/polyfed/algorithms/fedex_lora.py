"""FedEx-LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from polyfed.aggregation.averagings.low_rank import Residual, only, without
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, WeightAveraging, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg


class FedExLoRA(FedAvg):
    """Exact aggregation of low-rank adapters (Singhal et al., ACL 2025, Eq. 10 to 13).

    A and B are averaged, and what the product of the means lacks of the mean of the products is added to the frozen
    layer: what clients receive is the average of what they sent. Needs ``adapter.offset``.
    """

    takes_late_replies: ClassVar[bool] = False
    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Residual)] = Residual()

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {}

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast adapters and offsets, train the adapters, average them exactly."""
        sent = without((name for weights in server.weights.values() for name in weights), offsets=True)
        replies = cohort.ask(self.fit, check=server.weights_check(sent), weights=each(server.weights_for))
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model; offsets do not change, and are not sent back."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        sent = without(weights, offsets=True)
        return Reply(weights=client.weights.part(sent), num_examples=client.num_examples)
