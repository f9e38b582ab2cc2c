"""FFA-LoRA."""

from __future__ import annotations

from typing import Annotated, ClassVar

from polyfed.aggregation.averagings.low_rank import Separate, fresh, only, without
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_step,
    each,
)
from polyfed.algorithms.fedavg import FedAvg


class FFALoRA(FedAvg):
    """Federated freeze-A low-rank adaptation (Sun et al., ICLR 2024, section 4).

    A is drawn once, from the seed of the run, and neither trained nor sent; B is averaged. The mean of B times A is the
    mean of the changes, and noise of a private run does not multiply.
    """

    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()

    # ---- server half

    def setup(self, server: Server) -> None:
        super().setup(server)
        seed = server.clock.seed
        server.update_weights({kind: {**tensors, **fresh(tensors, seed)} for kind, tensors in server.weights.items()})

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast all but A, train, average."""
        sent = without((name for weights in server.weights.values() for name in weights), factor="a")
        part = each(lambda client: server.weights_for(client).part(sent))
        replies = cohort.ask(self.fit, check=server.weights_check(sent), weights=part)
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train B, and what has no factors, with the A that all have."""
        own = client.model.exchanged()
        client.load_weights({**own, **fresh(own, client.clock.seed), **weights})
        client.trainer(only=lambda name: name in weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights.part(weights), num_examples=client.num_examples)
