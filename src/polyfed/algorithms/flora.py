"""FLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from polyfed.aggregation.averagings.low_rank import Stacked, fresh, only, without
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, WeightAveraging, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg


class FLoRA(FedAvg):
    """Stacked low-rank adapters, of whatever ranks (Wang et al., NeurIPS 2024, Algorithm 1).

    Each round begins with new adapters. These side by side are the mean of their changes, which is added to the frozen
    layers. Needs ``adapter.offset``. The sum of all rounds so far is sent, not the stack of the last one: clients need
    not take part in each.
    """

    takes_late_replies: ClassVar[bool] = False
    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Stacked)] = Stacked()

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {}

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast what was added so far and new adapters, train these, add their mean."""
        key = server.clock.seed, server.clock.round
        server.update_weights({kind: {**tensors, **fresh(tensors, *key)} for kind, tensors in server.weights.items()})
        sent = without((name for weights in server.weights.values() for name in weights), offsets=True)
        replies = cohort.ask(self.fit, check=server.weights_check(sent), weights=each(server.weights_for))
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the new adapters; what was added before does not change, and is not sent back."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        sent = without(weights, offsets=True)
        return Reply(weights=client.weights.part(sent), num_examples=client.num_examples)
