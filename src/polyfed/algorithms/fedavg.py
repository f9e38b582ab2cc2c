"""FedAvg."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from pydantic import Field, SerializeAsAny

from polyfed.aggregation.averaging import Averaging, ByType
from polyfed.aggregation.collaboration import require_exchangeable
from polyfed.algorithms.algorithm import Client, Cohort, Reply, Server, Weights, client_step, each
from polyfed.algorithms.shared.global_models import GlobalModels, average, holders_of


class FedAvg(GlobalModels):
    """Federated averaging (McMahan et al. 2017, Algorithm 1), of one global model for each type of clients.

    Clients of one architecture, task and classes are a type; their weights are averaged by sample count.

    Other methods that average weights derive from this class and replace what they change: the client half
    (``train``), what becomes of the replies (``aggregate``), the default of ``averaging``, or the round.
    """

    learns_by_fit: ClassVar[bool] = True

    averaging: SerializeAsAny[Averaging] = Field(
        default=ByType(), description="how trained weights become the global models: by_type, by_slot, fedcola, fediot"
    )

    @property
    def mixes_types(self) -> bool:
        return self.averaging.mixes_types

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": "num_examples"}

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start everybody from common initial weights.

        Raises:
            ConfigError: types that are to average layers with each other cannot.
        """
        require_exchangeable(holders_of(server), self.averaging.scope)
        super().setup(server)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train, average: w <- sum_k n_k w_k / sum_k n_k."""
        replies = cohort.ask(self.fit, check=self.shape_check(server), weights=each(server.weights_for))
        self.aggregate(server, cohort, replies)

    def aggregate(self, server: Server, cohort: Cohort, replies: Iterable[Reply]) -> None:
        """Fold replies with ``weights`` and ``num_examples`` into the global models as they come."""
        average(server, cohort, replies, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model on the client's own task."""
        client.load_weights(weights)
        self.train(client)
        return Reply(weights=Weights(client.model.exchanged()), num_examples=client.num_examples)

    def train(self, client: Client) -> None:
        """Local training; what most methods replace."""
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
