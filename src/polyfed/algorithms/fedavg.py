"""FedAvg."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pydantic import Field

from polyfed.aggregation.mean import WeightedMean
from polyfed.algorithms.algorithm import Algorithm, Reply, client_query, client_step, each
from polyfed.errors import PayloadError
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.payload import Weights
from polyfed.federation.server import Server


class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), modality by modality.

    Tensors are averaged by name over the clients that have them, weighted by sample count: image encoders over all
    clients with images, text encoders over all with text, a classifier over the clients of its task (CreamFL,
    section 4.1). Clients of one modality therefore need one architecture for it.
    """

    local_epochs: int = Field(default=5, ge=1, description="E, passes over private data a round")

    def setup(self, server: Server) -> None:
        """Everybody starts from the server's initial weights."""
        server.share_weights()

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average: w <- sum_k n_k w_k / sum_k n_k."""
        mean = WeightedMean()
        for reply in cohort.ask(self.fit, check=_like(server), weights=each(server.weights_for)):
            mean.add(reply.weights, reply.num_examples)
        server.update_weights(mean.result())

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the client's own task."""
        client.receive(weights)
        client.fit(client.train, epochs=self.local_epochs)
        return Reply(weights=Weights(client.model.state_dict()), num_examples=client.num_examples)

    def evaluate_clients(self, server: Server, cohort: Cohort) -> Mapping[str, Mapping[str, float]]:
        """Every asked client's test metrics of the global model of its kind."""
        replies = cohort.ask(self.assess_global, weights=each(server.weights_for))
        return {reply.sender.id: reply.payload.scalars for reply in replies}  # type: ignore[misc]

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received model on the client's test samples."""
        client.receive(weights)
        return self.assess(client)


def _like(server: Server) -> Callable[[Reply], None]:
    def check(reply: Reply) -> None:
        reply.require_examples()
        expected = server.architectures[reply.sender.architecture]
        found = {name: tensor.shape for name, tensor in reply.weights.items()}
        if found != dict(expected):
            wrong = sorted(set(found.items()) ^ set(expected.items()))[0][0]
            raise PayloadError(f"weights do not match the architecture, first at '{wrong}'")

    return check
