"""FedSA-LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from polyfed.aggregation.averagings.low_rank import Separate, only, without
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Lifetime,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.fedavg import FedAvg


class FedSALoRA(FedAvg):
    """Federated share-A low-rank adaptation (Guo et al., ICLR 2025, section 3.2).

    A, which learns what is general, is averaged, as is all that has no factors; B, which learns what is a client's own,
    stays there.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN}
    has_global_models: ClassVar[bool] = False
    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast all but B, train both, average."""
        sent = without((name for weights in server.weights.values() for name in weights), factor="b")
        part = each(lambda client: server.weights_for(client).part(sent))
        replies = cohort.ask(self.fit, check=server.weights_check(sent), weights=part)
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the client's own model with what was received in it."""
        client.model.load(weights, partly=True)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights.part(weights), num_examples=client.num_examples)
