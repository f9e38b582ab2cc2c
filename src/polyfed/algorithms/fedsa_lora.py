"""FedSA-LoRA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar

from polyfed.aggregation.averagings.low_rank import Separate, only, without
from polyfed.algorithms.algorithm import (
    Client,
    ClientInfo,
    Cohort,
    Lifetime,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_query,
    client_step,
    each,
)
from polyfed.algorithms.fedavg import FedAvg


class FedSALoRA(FedAvg):
    """Federated share-A low-rank adaptation (Guo et al., ICLR 2025, section 3.2).

    A, which learns what is general, is averaged, as is all that has no factors; B, which learns what is a client's own,
    stays there. A client is judged as it would go on: by the averaged A and its own B.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN}
    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast all but B, train both, average."""
        sent = _shared(name for weights in server.weights.values() for name in weights)
        part = each(lambda client: self.judged(server, client))
        replies = cohort.ask(self.fit, check=server.weights_check(sent), weights=part)
        server.average_weights(replies, cohort.clients, self.averaging)

    def judged(self, server: Server, client: ClientInfo) -> Weights:
        """See ``Algorithm``; of a client's global model all but B, as in a round."""
        weights = server.weights_for(client)
        return weights.part(_shared(weights))

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the client's own model with what was received in it."""
        client.model.load(weights, partly=True)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights.part(weights), num_examples=client.num_examples)

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the client's own model with what was received in it."""
        client.model.load(weights, partly=True)
        return self.assess(client)


def _shared(names: Iterable[str]) -> frozenset[str]:
    return without(names, factor="b")
