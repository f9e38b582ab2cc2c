"""Clients that agree with each other: they learn the mean of their representations of a public set."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    Lifetime,
    Reply,
    Representations,
    Server,
    client_step,
)
from polyfed.algorithms.shared.digest import Digest
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Teacher


class Consensus(Algorithm):
    """FedMD (Li and Wang, 2019), on representations of the public set instead of class scores.

    In a round clients *digest* the server's representations, *revisit* their private data, and send their own
    representations; the server learns the mean of these.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN}
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    local_epochs: int = Field(default=1, ge=1, description="passes over private data per round")
    public: PublicExchange = PublicExchange()
    digest: Digest | None = Field(default=Digest(epochs=2), description="clients fit the consensus; null: they do not")
    teacher: Teacher = Teacher()
    distiller: Distiller = Distiller(epochs=2)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Ask all clients, average by modality, learn the mean."""
        exchange = self.teacher.exchange(self.public, server)
        for reply in exchange.ask(cohort, self.fit, representations=exchange.pairs):
            exchange.add(reply, reply.representations)
        self.distiller.distil(server, self.public, exchange.targets())

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """Digest, revisit, and represent the public set."""
        if self.digest is not None:
            self.digest.fit(client, self.public, self.public.from_wire(client, representations))
        client.fit(client.train, epochs=self.local_epochs)
        own = self.public.client_outputs(client, representations.order, representations)
        return Reply(representations=own, num_examples=client.num_examples)
