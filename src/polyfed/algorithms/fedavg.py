"""FedAvg."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from polyfed.aggregation.averaging import Update
from polyfed.aggregation.averagings.tensors import ByType
from polyfed.aggregation.mean import WeightedMean
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
from polyfed.algorithms.shared.moves import Moves


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), of one global model for each type of clients.

    Clients of one architecture, task and classes are a type; their weights are averaged by sample count.

    >>> method = FedAvg(local_epochs=1)
    >>> method.averaging.component_name(), method.summed
    ('by_type', {'fit': 'num_examples'})
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
        """Broadcast, train, average."""
        replies = cohort.ask(self.fit, check=server.weights_check(), weights=each(server.weights_for))
        self.average(server, cohort, replies)

    def average(self, server: Server, cohort: Cohort, replies: Iterable[Reply]) -> None:
        """w <- sum_k n_k w_k / sum_k n_k over the clients of each type, as replies come; none is held.

        From these means ``averaging`` makes the new global models, unless it averages in another way. Records
        how far the server's own model ``followed`` its clients, or their ``disagreement`` (see ``Moves``).
        """
        models, moves = server.global_models.by_type(), Moves()
        own = server.own_type if server.has_model and cohort.secure is None else ""  # of a sum no client is seen
        if self.averaging.starts_from_means:
            means = {name: WeightedMean() for name in models}
            for reply in replies:
                # mean <- mean + n_k / n (w_k - mean), n being the samples so far
                means[name := server.type_of(reply.sender)].add(reply.weights, reply.num_examples)
                if name == own:
                    moves.add(reply.weights, models[name].weights)
                del reply  # before the next client trains
            new = self.averaging.of_means(models, means)
        else:

            def update(reply: Reply) -> Update:
                name = server.type_of(reply.sender)
                moves.add(reply.weights, models[name].weights, compared=True)
                return name, reply.weights, reply.num_examples

            # unlike a loop, map lets go of a reply before it asks for the next
            asked = server.global_models.samples_by_type(cohort.clients)
            new = self.averaging.of_updates(models, map(update, replies), asked)
        new = self.averaging.server_optimizer.step(server.weights, new, server.state)
        if own:
            is_mean = self.averaging.starts_from_means
            server.record(**moves.followed(new[own], models[own].weights) if is_mean else moves.disagreement())
        server.update_weights(new)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the client's own task."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights, num_examples=client.num_examples)
