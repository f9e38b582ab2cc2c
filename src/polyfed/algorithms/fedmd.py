"""FedMD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from polyfed.aggregation.weighting import Margin
from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.digest import Digest
from polyfed.algorithms.shared.distiller import Distiller, ServerTask, TaughtServer
from polyfed.algorithms.shared.public_exchange import PublicExchange, of_part
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.untrusted import read_json


class FedMD(TaughtServer):
    """Heterogeneous federated learning by model distillation (FedMD, Li and Wang, 2019), on representations.

    A round has the steps of the paper's Algorithm 1, named at the statements: clients *communicate* their
    outputs on public samples (the paper: 5,000 drawn anew), the server *aggregates* their mean and *distributes* it,
    clients *digest* it (fit the consensus) and *revisit* their own data. The paper's transfer learning before the first
    round is left out.

    The paper exchanges class scores of one classification and has no server model. Here participants of any task agree
    on representations, by modality, and the server distils the same consensus, as CreamFL and FedAFD compare it (a
    reconstruction: how those papers did it is not published).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}

    local_epochs: int = Field(default=5, ge=1, description="E, passes that revisit private data per round")
    digest: Digest | None = Field(default=Digest(), description="clients fit the consensus; null: they do not")
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher()
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Distiller()

    @property
    def clients_learn(self) -> bool:
        return self.digest is not None

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """One pass of the loop of Algorithm 1, with a server that learns the consensus too."""
        exchange = self.exchange(server)
        for reply in exchange.ask(cohort, self.tell, order=exchange.order, channels=exchange.wanted):  # Communicate
            exchange.add(reply, reply.knowledge)  # Aggregate: f~(x) = 1/m sum_k f_k(x)
        consensus = exchange.targets()
        server.record(**{f"consensus.{name}": float(target.valid.float().mean()) for name, target in consensus.items()})
        # a row is 0 where all weights are 0: no consensus on the sample
        agreed = {name: target.values for name, target in of_part(consensus).items() if bool(target.valid.any())}
        distributed = self.public.for_clients(Representations(agreed, order=exchange.order))
        for _ in cohort.ask(self.learn, consensus=distributed):  # Distribute, Digest, Revisit
            pass
        self.train_task(server)
        self.distil(server, consensus)

    # ---- client half

    @client_step(knowledge=Representations, num_examples=int, mean_by="num_examples")
    def tell(self, client: Client, order: str, channels: str) -> Reply:
        """Communicate: the client's outputs f_k(x) on the exchanged samples, those that ``channels`` lists as JSON."""
        own = self.public.client_outputs(client, order, read_json(channels))
        return Reply(knowledge=own, num_examples=client.num_examples)

    @client_step()
    def learn(self, client: Client, consensus: Representations) -> Reply:
        """Digest, then Revisit."""
        if self.digest is not None:
            agreed = {name: values.to(client.device) for name, values in consensus.items()}
            self.digest.fit(client, self.public, agreed)  # Digest: f_k approaches f~ on the exchanged samples
        client.fit(client.train, epochs=self.local_epochs)  # Revisit: D_k
        return Reply()


class MarginWeighted(FedMD):
    """FedMD whose consensus counts a client by how clearly it prefers its answer on a sample.

    A stand-in, not a reconstruction: FedAFD (CVPR 2026) compares with a method called FedDFA, of which no more is known
    here than that its weights look at decision boundaries.
    """

    short_name: ClassVar[str] = "margin_weighted"

    teacher: Teacher = Teacher(weights=Margin())
