"""FedMD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.weighting import Margin
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    FederationPlan,
    Lifetime,
    Logits,
    Reply,
    Representations,
    Server,
    client_step,
    each,
)
from polyfed.algorithms.shared.digest import Digest
from polyfed.algorithms.shared.distiller import (
    Distiller,
    ServerTask,
    TaughtServer,
    compares_rows,
    require_learning,
    train_task,
)
from polyfed.algorithms.shared.public_exchange import EitherExchange, PublicOutputs, of_part
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.untrusted import read_json
from polyfed.wire.schema import Declared


class FedMD(TaughtServer):
    """Heterogeneous federated learning by model distillation (FedMD, Li and Wang, 2019).

    A round: clients send their outputs on public samples (the paper: 5,000 drawn anew), the server takes the mean, and
    clients *digest* it (fit the consensus) and *revisit* their own data. The paper's training before the first round,
    on the labelled public set and then on own data until each converges, is left out.

    The paper exchanges class scores of one classification and has no server model. Here the server has one, which
    distils the same consensus, as CreamFL and FedAFD compare it; and with ``public.form: representations`` participants
    of any task agree on representations instead, by modality (a reconstruction: how those papers did it is not
    published).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}

    local_epochs: int = Field(default=5, ge=1, description="E, passes that revisit private data a round")
    digest: Digest | None = Field(default=Digest(), description="clients fit the consensus; null: they do not")
    public: EitherExchange = EitherExchange()
    teacher: Teacher = Teacher()
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Distiller()

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        require_learning(self.task, self.distiller, self.teacher, others_learn=self.digest is not None)
        return self

    def sends(self, declared: Declared) -> Declared:
        return self.public.sends(declared)

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if self.digest is not None:
            self.digest.require(self.public)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Clients tell, the mean of what they say is the consensus, they and the server learn it."""
        train_task(self.task, "first", server)
        own = self.public.server_outputs(server)
        consensus = self.consensus(server, cohort, own)
        # where everybody's weight is 0 a row is 0: clients take that for no consensus on the sample
        agreed = {name: target.values for name, target in of_part(consensus).items() if bool(target.valid.any())}
        shared = self.public.outputs_for(self.public.bundle(agreed, own.order))
        for _ in cohort.ask(self.learn, consensus=each(shared)):
            pass
        self.learn_from(consensus, server)

    def consensus(self, server: Server, cohort: Cohort, own: PublicOutputs) -> dict[str, Ensembled]:
        """The weighted mean of the clients' outputs, by output."""
        ensembles = self.teacher.ensembles(server, self.public, own, keep_rows=compares_rows(self.distiller))
        replies = cohort.ask(
            self.tell,
            like=self.public.layout(server, own, "knowledge"),
            order=own.order,
            channels=each(self.public.asked(own)),
        )
        for reply in replies:
            ensembles.add(reply, reply.knowledge)
        targets = ensembles.targets()
        server.record(**{f"consensus.{name}": float(target.valid.float().mean()) for name, target in targets.items()})
        return targets

    # ---- client half

    @client_step(knowledge=Representations | Logits, num_examples=int, mean_by="num_examples")
    def tell(self, client: Client, order: str, channels: str) -> Reply:
        """The client's outputs on the exchanged samples, those that ``channels`` lists as JSON."""
        own = self.public.client_outputs(client, order, read_json(channels))
        return Reply(knowledge=own, num_examples=client.num_examples)

    @client_step()
    def learn(self, client: Client, consensus: Representations | Logits) -> Reply:
        """Digest, then revisit: fit the outputs on the exchanged samples where there is a consensus, then train."""
        if self.digest is not None:
            # of the client's own outputs only: others are not sent to it
            agreed = {name: values.to(client.device) for name, values in consensus.items()}
            self.digest.fit(client, self.public, agreed)
        client.fit(client.train, epochs=self.local_epochs)
        return Reply()


class MarginWeighted(FedMD):
    """FedMD whose consensus counts a client by how clearly it prefers its answer on a sample.

    A stand-in, not a reconstruction: FedAFD (CVPR 2026) compares with a method called FedDFA, of which no more is known
    here than that its weights look at decision boundaries.
    """

    short_name: ClassVar[str] = "margin_weighted"

    teacher: Teacher = Teacher(weights=Margin())
