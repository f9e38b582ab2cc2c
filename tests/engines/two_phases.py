"""A method with two phases a round, in a module that polyfed knows nothing of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from polyfed.aggregation.mean import WeightedMean
from polyfed.algorithms.algorithm import Algorithm, Lifetime, Reply, client_step, each
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.wire.payload import Weights


class TwoPhases(Algorithm):
    """Train and average; then measure the average everywhere, and train on with steps by the losses.

    Each client keeps its model from the first phase for the second, and an optimiser for the whole run.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"optimizer": Lifetime.RUN, "first": Lifetime.ROUND}

    def setup(self, server: Server) -> None:
        server.share_weights()

    def round(self, server: Server, cohort: Cohort) -> None:
        self._average(server, cohort.ask(self.fit, weights=each(server.weights_for)))
        seen = {r.sender.id: r.loss for r in cohort.ask(self.measure, weights=each(server.weights_for))}
        worst = max(seen.values())
        share = each(lambda client: seen[client.id] / worst)
        self._average(server, cohort.ask(self.again, weights=each(server.weights_for), share=share))
        server.record(worst=worst)

    def _average(self, server: Server, replies) -> None:
        means = {kind: WeightedMean() for kind in server.types}
        for reply in replies:
            means[server.type_of(reply.sender)].add(reply.weights, 1.0)
        server.update_weights({kind: mean.result() for kind, mean in means.items()})

    @client_step(weights=Weights)
    def fit(self, client: Client, weights: Weights) -> Reply:
        client.load_weights(weights)
        client.fit(client.train, epochs=1)
        client.state["first"] = {name: value.clone() for name, value in client.model.state_dict().items()}
        return Reply(weights=Weights(client.model.state_dict()))

    @client_step(loss=float)
    def measure(self, client: Client, weights: Weights) -> Reply:
        client.load_weights(weights)
        gap = sum(float((value - client.state["first"][name]).float().norm()) for name, value in weights.items())
        return Reply(loss=gap + client.num_examples)

    @client_step(weights=Weights)
    def again(self, client: Client, weights: Weights, share: float) -> Reply:
        first = client.state["first"]
        mixed = {
            name: value + share * (first[name] - value) if value.is_floating_point() else value
            for name, value in weights.items()
        }
        client.load_weights(mixed)
        client.fit(client.train, epochs=1, purpose="again")
        return Reply(weights=Weights(client.model.state_dict()))
