"""FedAFD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

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
)
from polyfed.algorithms.shared.adversarial_alignment import AdversarialAlignment, NoAlignment
from polyfed.algorithms.shared.distiller import Distiller, ServerTask, TaughtServer
from polyfed.algorithms.shared.guided_fusion import GuidedFusion, NoFusion
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.federation.trainer import step_together
from polyfed.models.model import Model
from polyfed.tasks.task import Task


class FedAFD(TaughtServer):
    """Adversarial fusion and distillation (FedAFD, CVPR 2026): personal clients and a large server model.

    The server trains on P and sends its representations of P, and its encoders (every ``broadcast_every`` rounds). A
    client trains its task on features fused with those of the frozen encoders (GFF), while two discriminators per
    modality, which stay with it, push its public representations towards the server's of the same and of the other
    modality (BAA). The server weighs clients' representations of P by similarity to its own (SED) and distils them.
    Clients are judged with their own model and fusion.

    Sections and equations at statements are those of the paper's supplement. Defaults follow the paper, and the
    released code where the supplement is silent (E, gamma, optimisers); clients receive their own encoders only. Other
    behaviour of the released code is an option of a section, bundled in the preset ``fedafd-released``. Without BAA:
    ``adversarial: null``; without GFF: ``fusion: null``; without SED: ``teacher.weights: mean``.

    >>> method = FedAFD(adversarial={"weight": 0.1}, fusion=None)
    >>> method.teacher.weights.component_name(), method.adversarial.loss, method.distiller.weight
    ('sed', 'minimax', 0.4)
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = dict.fromkeys(
        ("model", "optimizer", "encoders", "features"), Lifetime.RUN
    )
    shares_encoders: ClassVar[bool] = True
    takes_late_replies: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs per round")
    adversarial: AdversarialAlignment | None = Field(
        default=AdversarialAlignment(), description="adversarial alignment (BAA); null: none"
    )
    fusion: GuidedFusion | None = Field(
        default=GuidedFusion(), description="fusion with the server's features (GFF); null: none"
    )
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(weights=SED())
    task: ServerTask | None = Field(
        default=ServerTask(order="first"),
        description="on P, before the broadcast as in the released code; the supplement (A.1.2) leaves that open",
    )
    distiller: Distiller | None = Field(default=Distiller(weight=0.4), description="its weight is the paper's gamma")

    @property
    def baa(self) -> AdversarialAlignment | NoAlignment:
        return self.adversarial or NoAlignment()

    @property
    def gff(self) -> GuidedFusion | NoFusion:
        return self.fusion or NoFusion()

    def require_task(self, where: str, task: Task) -> None:
        if self.fusion is not None and task.looks_in_public:
            raise ConfigError(
                f"{where}: imputation nearest looks in the public set as a client's own model sees it, and algorithm "
                "'fedafd' trains a fused one; choose another imputation, or set algorithm.fusion=null"
            )

    def add_modules(self, model: Model) -> None:
        """Adds the discriminators and the fusion."""
        self.baa.add_modules(model)
        self.gff.add_modules(model)

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """The server's task (A.1.2, Eq. 2), local training (A.1.1), distillation (A.1.2, Eq. 3)."""
        exchange = self.exchange(server)  # Eq. 2: train w_g on P (task.order: first), then represent P
        version, encoders = self.gff.broadcast(server)
        sent = {"representations": exchange.pairs, "encoders": encoders, "version": version}
        for reply in exchange.ask(cohort, self.fit, **sent):  # A.1.1
            self.gff.delivered(server, reply)
            exchange.add(reply, reply.representations)  # SED: weights by similarity to the server's own
        self.train_task(server)  # Eq. 2 here instead, with task.order: last
        self.distil(server, exchange.targets())  # Eq. 3: w_g distils, with factor gamma

    # ---- client half

    @client_query(float)
    def assess(self, client: Client) -> Reply:
        """Evaluate the client's model, fused; before it receives encoders, by its own features."""
        fused = self.gff.evaluate(client)
        return super().assess(client) if fused is None else Reply(**fused)

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations, encoders: Weights, version: int) -> Reply:
        """Local training step (Eq. 1), E epochs; then representations of the public set, unfused."""
        server_outputs = self.public.from_wire(client, representations)
        # an optimiser each for phi_c with C_c, for A_c, and for D_c
        model = client.trainer(only=lambda name: not name.startswith("extras."))
        task = self.gff.client_task(client, encoders, version)
        client.model.train()
        for epoch in client.epochs(self.local_epochs):
            for private, public in self.baa.batches(client, self.public, server_outputs, epoch):
                losses, trainers = [], [model]
                if public is not None:  # max over D_c of L_adv, then beta L_adv for phi_c
                    losses.append(self.baa.against(client, public, server_outputs))
                if private is not None:  # L_task for phi_c, C_c and A_c
                    losses.append(task.loss(private))
                    trainers += task.trainers
                step_together(torch.stack(losses).sum(), *trainers)
        own = self.public.client_outputs(client, representations.order, representations)
        return Reply(representations=own, num_examples=client.num_examples)
