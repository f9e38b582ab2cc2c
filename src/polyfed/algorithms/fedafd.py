"""FedAFD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.weighting import SED
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Lifetime,
    Reply,
    Representations,
    Server,
    Weights,
    client_query,
    client_step,
    each,
)
from polyfed.algorithms.shared.adversarial_alignment import AdversarialAlignment
from polyfed.algorithms.shared.distiller import (
    Distiller,
    ServerTask,
    TaughtServer,
    compares_rows,
    require_learning,
    train_task,
)
from polyfed.algorithms.shared.guided_fusion import GuidedFusion
from polyfed.algorithms.shared.public_exchange import PublicExchange, PublicOutputs, of_part
from polyfed.algorithms.shared.public_training import Pair
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.trainer import step_together
from polyfed.models.fusion import FusionGuidance
from polyfed.models.model import Model
from polyfed.tasks.task import Task


class FedAFD(TaughtServer):
    """Adversarial fusion and distillation (FedAFD, CVPR 2026): personal clients and a large server model.

    A round: the server trains on P and sends its representations of P, and its encoders (every ``broadcast_every``
    rounds). A client trains its task on features fused with those of the frozen encoders (GFF), while two
    discriminators a modality, which stay with it, push its public representations towards the server's of the same and
    of the other modality (BAA). The server weighs clients' representations of P by likeness to its own (SED) and
    distils them. Clients are judged with their own model and fusion.

    Defaults follow the paper; where the released code differs, the other behaviour is an option, bundled in the preset
    ``fedafd-released``. Without BAA: ``adversarial: null``; without GFF: ``fusion: null``; without SED:
    ``teacher.weights: mean``.

    >>> method = FedAFD(adversarial={"weight": 0.1}, fusion=None)
    >>> method.teacher.weights.component_name(), method.adversarial.loss, method.distiller.weight
    ('sed', 'minimax', 0.4)
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "model": Lifetime.RUN,
        "optimizer": Lifetime.RUN,
        "encoders": Lifetime.RUN,
        "features": Lifetime.RUN,
    }
    shares_encoders: ClassVar[bool] = True
    takes_late_replies: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs a round")
    adversarial: AdversarialAlignment | None = Field(
        default=AdversarialAlignment(), description="adversarial alignment (BAA); null: none"
    )
    fusion: GuidedFusion | None = Field(
        default=GuidedFusion(), description="fusion with the server's features (GFF); null: none"
    )
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(weights=SED())
    task: ServerTask | None = Field(
        default=ServerTask(order="first"), description="on P, before the broadcast (Alg. 1)"
    )
    distiller: Distiller | None = Field(default=Distiller(weight=0.4), description="its weight is the paper's gamma")

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        require_learning(self.task, self.distiller, self.teacher)
        return self

    def require_task(self, where: str, task: Task) -> None:
        if self.fusion is not None and task.looks_in_public:
            raise ConfigError(
                f"{where}: imputation nearest looks in the public set as a client's own model sees it, and algorithm "
                "'fedafd' trains a fused one; choose another imputation, or set algorithm.fusion=null"
            )

    def add_modules(self, model: Model) -> None:
        """The discriminators and the fusion."""
        if self.adversarial is not None:
            self.adversarial.add_modules(model)
        if self.fusion is not None:
            self.fusion.add_modules(model)

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Train on P, send representations and encoders, weigh what comes back (SED), distil it."""
        train_task(self.task, "first", server)
        targets = self.ask(server, cohort, self.public.server_outputs(server))
        self.learn_from(targets, server)

    def ask(self, server: Server, cohort: Cohort, own: PublicOutputs) -> dict[str, Ensembled]:
        """Send representations, and encoders to those who lack the current ones; weigh what comes back (SED)."""
        ensembles = self.teacher.ensembles(server, self.public, own, keep_rows=compares_rows(self.distiller))
        version, encoders = self.encoders(server, cohort)
        replies = cohort.ask(
            self.fit,
            check=self.public.check(server, own, "representations"),
            representations=self.public.to_wire(server, of_part(own), own.order),
            encoders=each(lambda client: Weights(encoders[client.id])),
            version=version,
        )
        for reply in replies:
            sent = 0 if self.fusion is None else self.fusion.broadcast(server.clock.round - reply.staleness)
            server.state.setdefault("received", {})[reply.sender.id] = torch.tensor(sent)
            ensembles.add(reply, reply.representations)
        return ensembles.targets()

    def encoders(self, server: Server, cohort: Cohort) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """The round of the current broadcast, and client -> its encoders, none for those who have them."""
        if self.fusion is None:
            return 0, {client.id: {} for client in cohort.clients}
        version, encoders = self.fusion.current_encoders(server)
        return version, {
            client.id: {}
            if self.fusion.has_encoders(server, client, version)
            else self.fusion.encoders_for(client, encoders)
            for client in cohort.clients
        }

    # ---- client half

    @client_query(float)
    def assess(self, client: Client) -> Reply:
        """Evaluate the client's model, fused; a client that has never received encoders by its own features."""
        fused = None if self.fusion is None else self.fusion.evaluate(client)
        return super().assess(client) if fused is None else Reply(**fused)

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations, encoders: Weights, version: int) -> Reply:
        """E epochs of task and alignment (supplement, Eq. 1), then representations of the public set, unfused."""
        server_outputs = self.public.from_wire(client, representations)
        guidance = None if self.fusion is None else self.fusion.receive(client, encoders, version)
        if self.fusion is not None:
            self.fusion.begin(client)
        client.model.train()
        for epoch in client.epochs(self.local_epochs):
            for private, public in self.batches(client, server_outputs, epoch):
                self.step(client, private, public, server_outputs, guidance)
        own = self.public.client_outputs(client, representations.order, representations)
        return Reply(representations=own, num_examples=client.num_examples)

    def batches(self, client: Client, server_outputs: Mapping[str, Tensor], epoch: int) -> Iterator[Pair]:
        """Private and public batches of one epoch."""
        if self.adversarial is not None:
            return self.adversarial.batches(client, self.public, server_outputs, epoch)
        return ((batch, None) for batch in client.batches(client.train, f"task-{epoch}"))

    def step(
        self,
        client: Client,
        private: Batch | None,
        public: Batch | None,
        server_outputs: Mapping[str, Tensor],
        guidance: FusionGuidance | None,
    ) -> None:
        """One step of the discriminators, and one of encoders, classifier and fusion on the sum of all losses."""
        # one optimiser each for encoders with classifier, for the fusion and for the discriminators
        trainers, losses = [client.trainer(only=lambda name: not name.startswith("extras."))], []
        fusion = None if self.fusion is None else self.fusion.trainer(client)
        if self.adversarial is not None and public is not None:
            losses.append(self.adversarial.against(client, public, server_outputs))
        if private is not None:
            trainers += [fusion] if fusion is not None else []
            if self.fusion is not None and guidance is not None:
                losses.append(self.fusion.task_loss(client, private, guidance))
            else:
                losses.append(client.task_loss(private))
        step_together(torch.stack(losses).sum(), *trainers)
