"""CreamFL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.weighting import GCA
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    FederationPlan,
    Lifetime,
    Reply,
    Representations,
    Server,
    client_step,
)
from polyfed.algorithms.shared.distiller import (
    Distiller,
    ServerTask,
    TaughtServer,
    compares_rows,
    require_learning,
    train_task,
)
from polyfed.algorithms.shared.public_exchange import PublicExchange, PublicOutputs, of_part
from polyfed.algorithms.shared.public_training import FrozenCopy, Pair, Reference, Remembered, Stored
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.losses.contrast import inter_modal, intra_modal


class InterModal(Settings):
    """Contrast with the server's representations of the other modalities (Eq. 1)."""

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 1; released code 0.5")
    mask_siblings: bool = Field(default=False, description="leave captions of the same picture out of Eq. 1's sum")

    def loss(self, local: Tensor, target: Distinct, batch: Batch) -> Tensor:
        """Eq. 1 of representations [b, d] of a public batch against another modality's, mean over b."""
        own = target.inverse_index[batch.index]
        return inter_modal(local, target.rows, own, tau=self.tau, items=target.items, counts=target.counts)


class IntraModal(Settings):
    """Contrast between the server's and the client's previous representations of a modality (Eq. 2)."""

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 2; released code 0.5")
    reduction: Literal["sum", "mean"] = Field(
        default="sum",
        description="clients of several modalities: sum of the modalities' means of Eq. 2, or, as released, the mean "
        "over all their rows, which divides the sum by the number of modalities",
    )
    previous: Literal["cached", "on_the_fly"] = Field(
        default="cached", description="previous representations: those uploaded last, or recomputed batch by batch"
    )

    def loss(self, local: Tensor, consensus: Tensor, previous: Tensor, modalities: int) -> Tensor:
        """Eq. 2 of representations [b, d] in one of so many modalities, mean over b, as part of their sum or mean."""
        factor = 1.0 if self.reduction == "sum" else 1.0 / modalities
        return factor * intra_modal(local, consensus, previous, tau=self.tau)


class Contrast(Settings):
    """Contrasts of clients' public representations with the server's (Eq. 3)."""

    weight: float = Field(default=0.5, gt=0, description="gamma, weight of the contrasts (Eq. 3)")
    inter: InterModal | None = Field(default=InterModal(), description="inter-modal contrast (Eq. 1); null: none")
    intra: IntraModal | None = Field(default=IntraModal(), description="intra-modal contrast (Eq. 2); null: none")
    schedule: Literal["joint", "separate_pass"] = Field(
        default="joint", description="add the contrasts to the task loss (Eq. 3), or a pass of their own after it"
    )
    batch_size: int = Field(default=128, ge=2, description="public samples a step of local training")
    batches_per_epoch: int | None = Field(
        default=None, ge=1, description="joint: None gives every private step one; separate pass: None takes all of P"
    )

    @model_validator(mode="after")
    def _contrasts_something(self) -> Self:
        if self.inter is None and self.intra is None:
            raise ValueError("inter and intra are both null; set contrast itself to null")
        return self

    def targets(
        self, client: Client, public: PublicExchange, server_outputs: Mapping[str, Tensor]
    ) -> dict[str, Distinct]:
        """Modality -> the server's representations of the exchanged samples, as ``loss`` takes them."""
        inverse = public.inverse_index(client)
        items = public.drawn(client).items if self.inter is not None and self.inter.mask_siblings else None
        return {name: Distinct.of(rows, inverse.get(name), items) for name, rows in server_outputs.items()}

    def loss(self, client: Client, batch: Batch, targets: Mapping[str, Distinct], reference: Reference) -> Tensor:
        """Sum over the client's modalities of the inter-modal (Eq. 1) and intra-modal (Eq. 2) contrasts.

        ``batch`` is one of the exchanged samples, ``targets`` are the server's representations of these. Intra-modal
        contrasts are summed or averaged, as ``reduction`` says; inter-modal ones are always summed.
        """
        total = torch.zeros((), device=client.device)
        shared = [name for name in batch.inputs if name in targets]  # those that the server encodes
        for modality in shared:
            with client.autocast():
                local = client.model.represent(modality, batch.inputs[modality])
            if self.inter is not None:
                for target in [targets[other] for other in targets if other != modality]:
                    total = total + self.inter.loss(local, target, batch)
            if self.intra is not None:
                consensus, previous = targets[modality].of_samples(batch.index), reference(modality, batch)
                total = total + self.intra.loss(local, consensus, previous, len(shared))
        return total


class CreamFL(TaughtServer):
    """Contrastive representation ensemble and aggregation (Yu et al., ICLR 2023).

    A server model learns from clients of any modality, task and architecture that exchange only representations of a
    public set: clients train with contrastive regularisation towards the server's representations (Eq. 1-3), the
    server weighs what comes back by its contrast with the paired modality (Eq. 4-6) and distils it (Eq. 7).

    Defaults follow the paper; where the released code differs, the other behaviour is an option of the same name in
    the preset ``creamfl-released``. reamFL (no contrasts) is ``contrast: null``.

    >>> method = CreamFL(contrast={"weight": 0.1, "intra": None})
    >>> method.teacher.weights.component_name(), method.contrast.inter.tau, method.distiller.loss
    ('gca', 1.0, 'l2')
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = dict.fromkeys(("model", "optimizer", "previous"), Lifetime.RUN)
    takes_late_replies: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs a round")
    contrast: Contrast | None = Field(default=Contrast(), description="contrasts in local training; null: reamFL")
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(weights=GCA())
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Distiller()

    @model_validator(mode="after")
    def _of_one_piece(self) -> Self:
        require_learning(self.task, self.distiller, self.teacher)
        return self

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if len(plan.server_modalities) < 2 and self.contrast is not None and self.contrast.inter is not None:
            raise ConfigError(
                f"contrasts between modalities need two, but server.model encodes {plan.server_modalities}; "
                "add an encoder, or set algorithm.contrast.inter=null"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Algorithm 1: clients train, their representations become one target a modality, the server distils it."""
        train_task(self.task, "first", server)
        targets = self.ask(server, cohort, self.public.server_outputs(server))
        self.learn_from(targets, server)  # Eq. 7

    def ask(self, server: Server, cohort: Cohort, own: PublicOutputs) -> dict[str, Ensembled]:
        """Ask the cohort to train, and fold its representations into one target a modality (Eq. 4-6)."""
        ensembles = self.teacher.ensembles(server, self.public, own, keep_rows=compares_rows(self.distiller))
        replies = cohort.ask(
            self.fit,
            like=self.public.layout(server, own, "representations"),
            representations=self.public.to_wire(server, of_part(own), own.order),
        )
        for reply in replies:
            ensembles.add(reply, reply.representations)
        return ensembles.targets()

    # ---- client half

    @client_step(representations=Representations, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, representations: Representations) -> Reply:
        """ClientLocalTraining of Algorithm 1: E epochs of Eq. 3, then representations of the public set."""
        received = self.public.from_wire(client, representations)
        targets = self.contrast.targets(client, self.public, received) if self.contrast is not None else {}
        # before the first step: what Eq. 2 calls previous must not move with the model
        reference = self.reference(client)
        trainer = client.trainer()
        client.model.train()
        for epoch in client.epochs(self.local_epochs):
            for private, public in self.batches(client, epoch):
                # one step for both parts: Eq. 3 is a sum
                loss = torch.zeros((), device=client.device)
                if private is not None:
                    loss = loss + client.task_loss(private)
                if public is not None and self.contrast is not None:
                    loss = loss + self.contrast.weight * self.contrast.loss(client, public, targets, reference)
                trainer.step(loss)
        # with the trained model, Eq. 4 weighs what the client has become
        own = self.public.client_outputs(client, representations.order, representations)
        if self._looks_back("cached") and self.public.samples is None:  # the next time's samples may be others
            client.state["previous"] = of_part(self.public.from_wire(client, own))
        return Reply(representations=own, num_examples=client.num_examples)

    def batches(self, client: Client, epoch: int) -> Iterator[Pair]:
        """Private and public batches of one epoch, as ``contrast.schedule`` combines them."""
        if self.contrast is None:
            return ((batch, None) for batch in client.batches(client.train, f"task-{epoch}"))
        size, wanted, mixed = self.contrast.batch_size, self.contrast.batches_per_epoch, self.contrast.schedule
        return self.public.beside_private(client, "contrast", epoch, size, wanted, mixed=mixed == "joint")

    def reference(self, client: Client) -> Reference:
        """What Eq. 2 calls previous."""
        if self._looks_back("on_the_fly"):
            return FrozenCopy(client.model)
        kept = client.state.get("previous", {})
        if self._looks_back("cached") and not kept:  # those before training, which is where it last ended
            samples = self.public.drawn(client)
            if not self.public.augment:
                # all of P would be more than its batches need
                return Remembered(client.model, {name: samples.distinct(name)[1] for name in samples.modalities})
            kept = client.represent(samples)
        return Stored({name: value.to(client.device) for name, value in kept.items()})

    def _looks_back(self, previous: str) -> bool:
        intra = self.contrast.intra if self.contrast is not None else None
        return intra is not None and intra.previous == previous
