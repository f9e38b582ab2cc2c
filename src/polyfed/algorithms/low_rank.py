"""FedAvg of low-rank adapters: methods differ in the factors that are sent, averaged and kept."""

from __future__ import annotations

from typing import Annotated, ClassVar

from polyfed.aggregation.averagings.low_rank import Residual, Separate, SingularValues, Stacked, fresh, only, without
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, WeightAveraging, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg


class FedIT(FedAvg):
    """Federated instruction tuning (Zhang et al., ICASSP 2024, Algorithm 1): FedAvg of low-rank adapters.

    Factors A and B of each layer are averaged apart, over all clients that have the layer, whatever else they have.
    """

    short_name: ClassVar[str] = "fedit"
    learns_by_fit: ClassVar[bool] = True

    averaging: WeightAveraging = Separate()


class FFALoRA(FedAvg):
    """Federated freeze-A low-rank adaptation (Sun et al., ICLR 2024, section 4).

    A is drawn once, from the seed of the run, and neither trained nor sent; B is averaged. The mean of B times A is the
    mean of the changes, and noise of a private run does not multiply.
    """

    short_name: ClassVar[str] = "ffa_lora"
    learns_by_fit: ClassVar[bool] = True
    sends_parts: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Separate)] = Separate()

    # ---- server half

    def setup(self, server: Server) -> None:
        super().setup(server)
        seed = server.clock.seed
        server.update_weights({name: {**tensors, **fresh(tensors, seed)} for name, tensors in server.weights.items()})

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast all but A, train, average."""
        sent, means = without(_names(server), factor="a"), server.new_means(self.averaging, cohort)
        for reply in cohort.ask(self.fit, weights=each(lambda client: server.weights_for(client).part(sent))):
            means[reply.type].add(reply.weights, reply.num_examples)
        server.update_weights(server.averaged(self.averaging, means))

    # ---- client half

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train B, and what has no factors, with the A that all have."""
        own = client.model.exchanged()
        client.load_weights({**own, **fresh(own, client.clock.seed), **weights})
        client.trainer(only=lambda name: name in weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(weights=client.weights.part(weights), num_examples=client.num_examples)


class _WithOffsets(FedAvg):
    """FedAvg whose server adds to layers for good what adapters leave out, which it makes of each client's factors."""

    takes_late_replies: ClassVar[bool] = False

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast adapters and what was added so far, train the adapters, average them."""
        sent, means = without(_names(server), offsets=True), server.new_means(self.averaging, cohort)
        adapters = each(lambda client: server.weights_for(client).part(sent))
        for reply in cohort.ask(self.fit, like={"weights": adapters}, weights=each(server.weights_for)):
            means[reply.type].add(reply.weights, reply.num_examples)
        server.update_weights(server.averaged(self.averaging, means))

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the adapters; what was added before does not change, and is not sent back."""
        client.load_weights(weights)
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        sent = without(weights, offsets=True)
        return Reply(weights=client.weights.part(sent), num_examples=client.num_examples)


class FLoRA(_WithOffsets):
    """Stacked low-rank adapters, of whatever ranks (Wang et al., NeurIPS 2024, Algorithm 1).

    Each round begins with new adapters. These side by side are the mean of their changes, which is added to the frozen
    layers. Needs ``adapter.offset``. The sum of all rounds so far is sent, not the stack of the last one: clients need
    not take part in each.

    >>> FLoRA(local_epochs=1).averaging.component_name()
    'stacked'
    """

    short_name: ClassVar[str] = "flora"
    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Stacked)] = Stacked()

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast what was added so far and new adapters, train these, add their mean."""
        key = server.clock.seed, server.clock.round
        server.update_weights({name: {**tensors, **fresh(tensors, *key)} for name, tensors in server.weights.items()})
        super().round(server, cohort)


class FlexLoRA(FedAvg):
    """Low-rank adapters of unequal ranks (Bai et al., NeurIPS 2024, Algorithm 1).

    The server averages the changes B A themselves, and sends each client the nearest factors of its own rank.
    """

    short_name: ClassVar[str] = "flexlora"
    takes_late_replies: ClassVar[bool] = False
    learns_by_fit: ClassVar[bool] = True

    averaging: WeightAveraging = SingularValues()


class FedExLoRA(_WithOffsets):
    """Exact aggregation of low-rank adapters (Singhal et al., ACL 2025, Eq. 10 to 13).

    A and B are averaged, and what the product of the means lacks of the mean of the products is added to the frozen
    layer: what clients receive is the average of what they sent. Needs ``adapter.offset``.
    """

    short_name: ClassVar[str] = "fedex_lora"
    learns_by_fit: ClassVar[bool] = True

    averaging: Annotated[WeightAveraging, only(Residual)] = Residual()


def _names(server: Server) -> set[str]:
    """Names of the tensors of all global models."""
    return set().union(*server.weights.values())
