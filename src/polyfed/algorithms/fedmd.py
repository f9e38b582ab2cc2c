"""FedMD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
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
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.core.untrusted import read_json
from polyfed.data.samples import Samples
from polyfed.federation.participant import never
from polyfed.wire.schema import Declared


class Convergence(Settings):
    """When a training has converged: its main metric, on the samples that it is trained on, does not rise any more."""

    patience: int = Field(ge=1, description="passes without a rise after which it ends")
    rise: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="what counts as one, in units of the metric (percent)"
    )

    def watch(self, client: Client, samples: Samples) -> Callable[[], bool]:
        best, waiting = -math.inf, 0

        def is_over() -> bool:
            nonlocal best, waiting
            value = client.evaluate(samples)[client.task.primary]
            best, waiting = (value, 0) if value > best + self.rise else (best, waiting + 1)
            return waiting >= self.patience

        return is_over


class FirstTraining(Settings):
    """A training of a client before its first round."""

    epochs: int = Field(ge=1, description="passes, at most; the paper: until it converges")
    until: Convergence | None = Field(default=None, description="end these once they have converged; None: all")

    def train(self, client: Client, samples: Samples, what: str) -> None:
        is_over = never if self.until is None else self.until.watch(client, samples)
        client.fit(samples, epochs=self.epochs, once=True, purpose=f"first-{what}", until=is_over)


class FedMD(TaughtServer):
    """Heterogeneous federated learning by model distillation (FedMD, Li and Wang, 2019).

    Before its first round a client trains on the labelled public set, then on its own data, each until it converges
    (``first_*``; not at all by default). A round: clients send their
    outputs on public samples (the paper: 5,000 drawn anew), the server takes the mean, and clients *digest* it (fit the
    consensus) and *revisit* their own data.

    The paper exchanges class scores of one classification and has no server model. Here the server has one, which
    distils the same consensus, as CreamFL and FedAFD compare it; and with ``public.form: representations`` participants
    of any task agree on representations instead, by modality (a reconstruction: how those papers did it is not
    published).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN, "begun": Lifetime.RUN}

    local_epochs: int = Field(default=5, ge=1, description="E, passes that revisit private data a round")
    digest: Digest | None = Field(default=Digest(), description="clients fit the consensus; null: they do not")
    first_public: FirstTraining | None = Field(
        default=None,
        description="scores: training on the labelled public set before a client's first round; the paper's code: "
        "{epochs: 20, until: {patience: 3, rise: 0.5}}",
    )
    first_private: FirstTraining | None = Field(
        default=None,
        description="then on private data; the paper's code: {epochs: 25, until: {patience: 10, rise: 0.1}}",
    )
    public: EitherExchange = EitherExchange()
    teacher: Teacher = Teacher()
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Distiller()

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        require_learning(self.task, self.distiller, self.teacher, others_learn=self.digest is not None)
        return self

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"tell": "num_examples"} if self.teacher.is_plain_mean and not compares_rows(self.distiller) else {}

    def sends(self, declared: Declared) -> Declared:
        return self.public.sends(declared)

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if self.digest is not None:
            self.digest.require(self.public)
        self._require_labelled(plan)

    def _require_labelled(self, federation: FederationPlan | Server) -> None:
        labelled = self.public.exchanges_scores and self.public.has_classes(federation)
        if self.first_public is not None and not labelled:
            raise ConfigError(
                "algorithm.first_public: clients can only train on a labelled public set of their own classification: "
                "it needs public.form: scores and labels; set it to null"
            )

    def setup(self, server: Server) -> None:
        """Check that everybody has what crosses.

        Raises:
            ConfigError: somebody cannot.
        """
        super().setup(server)
        self._require_labelled(server)

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
            check=self.public.check(server, own, "knowledge"),
            order=own.order,
            channels=each(self.public.asked(own)),
        )
        for reply in replies:
            ensembles.add(reply, reply.knowledge)
        targets = ensembles.targets()
        server.record(**{f"consensus.{name}": float(target.valid.float().mean()) for name, target in targets.items()})
        return targets

    # ---- client half

    @client_step(knowledge=Representations | Logits, num_examples=int)
    def tell(self, client: Client, order: str, channels: str) -> Reply:
        """The client's outputs on the exchanged samples, those that ``channels`` lists as JSON; a client that is new
        here trains first."""
        if "begun" not in client.state:
            if self.first_public is not None:
                self.first_public.train(client, client.public_set, "public")
            if self.first_private is not None:
                self.first_private.train(client, client.train, "private")
            client.state["begun"] = {"round": torch.tensor(client.clock.round)}
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
