"""CreamFL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.weighting import GCA
from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.distiller import Distiller, ServerTask, TaughtServer
from polyfed.algorithms.shared.public_exchange import PublicExchange, of_part
from polyfed.algorithms.shared.public_training import FrozenCopy, Pair, Reference, Remembered, Stored
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.plan import FederationPlan
from polyfed.losses.contrast import inter_modal, intra_modal


class InterModal(Settings):
    """Contrast with the server's representations of the other modalities (Eq. 1)."""

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 1; released code 0.5")
    mask_siblings: bool = Field(default=False, description="leave captions of the same image out of Eq. 1's sum")

    def loss(self, local: Tensor, target: Distinct, batch: Batch) -> Tensor:
        """Eq. 1 of representations [b, d] of a public batch against another modality's, mean over b."""
        own = target.inverse_index[batch.index]
        return inter_modal(local, target.rows, own, tau=self.tau, items=target.items, counts=target.counts)


class IntraModal(Settings):
    """Contrast within a modality (Eq. 2): towards the server's representations, away from the client's last ones."""

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 2; released code 0.5")
    reduction: Literal["sum", "mean"] = Field(
        default="sum",
        description="clients of several modalities: sum of the modalities' means of Eq. 2, or, in the released code, "
        "the mean over all their rows, which divides the sum by the number of modalities",
    )
    previous: Literal["cached", "on_the_fly"] = Field(
        default="cached",
        description="previous representations: those uploaded last, or, in the released code, recomputed per batch",
    )

    def loss(self, local: Tensor, consensus: Tensor, previous: Tensor, modalities: int) -> Tensor:
        """Eq. 2 of representations [b, d] in one of so many modalities, mean over b, as part of their sum or mean."""
        factor = 1.0 if self.reduction == "sum" else 1.0 / modalities
        return factor * intra_modal(local, consensus, previous, tau=self.tau)

    def reference(self, client: Client, public: PublicExchange) -> Reference:
        """The previous representations of Eq. 2, to be fixed before the model moves."""
        if self.previous == "on_the_fly":
            return FrozenCopy(client.model)
        kept = client.state.get("previous", {})
        if not kept:  # the model is where its last training ended
            samples = public.drawn(client)
            if not public.augment:
                # encoded on demand: its batches may need less than all of P
                return Remembered(client.model, {name: samples.distinct(name)[1] for name in samples.modalities})
            kept = client.represent(samples)
        return Stored({name: value.to(client.device) for name, value in kept.items()})

    def keep(self, client: Client, public: PublicExchange, uploaded: Representations) -> None:
        """Keep what the client uploads as the previous representations of its next participation."""
        if self.previous == "cached" and public.samples is None:  # the next round may exchange other samples
            client.state["previous"] = of_part(public.from_wire(client, uploaded))


class Contrast(Settings):
    """Contrasts of clients' public representations with the server's (Eq. 3)."""

    weight: float = Field(default=0.5, gt=0, description="gamma, weight of the contrasts (Eq. 3)")
    inter: InterModal | None = Field(default=InterModal(), description="inter-modal contrast (Eq. 1); null: none")
    intra: IntraModal | None = Field(default=IntraModal(), description="intra-modal contrast (Eq. 2); null: none")
    schedule: Literal["joint", "separate_pass"] = Field(
        default="joint",
        description="add the contrasts to the task loss (Eq. 3), or a pass of their own after it (released code)",
    )
    batch_size: int = Field(default=128, ge=2, description="public samples per step of local training")
    batches_per_epoch: int | None = Field(
        default=None, ge=1, description="joint: None gives every private step one; separate pass: None takes all of P"
    )

    @model_validator(mode="after")
    def _contrasts_something(self) -> Self:
        if self.inter is None and self.intra is None:
            raise ValueError("inter and intra are both null; set contrast itself to null")
        return self

    def batches(self, client: Client, public: PublicExchange, epoch: int) -> Iterator[Pair]:
        """Private and public batches of one epoch, combined by ``schedule``."""
        mixed = self.schedule == "joint"
        return public.among_private(client, "contrast", epoch, self.batch_size, self.batches_per_epoch, mixed=mixed)

    def targets(
        self, client: Client, public: PublicExchange, server_outputs: Mapping[str, Tensor]
    ) -> dict[str, Distinct]:
        """Maps modalities to the server's representations of the exchanged samples, in the form of ``loss``."""
        inverse = public.inverse_index(client)
        items = public.drawn(client).items if self.inter is not None and self.inter.mask_siblings else None
        return {name: Distinct.of(rows, inverse.get(name), items) for name, rows in server_outputs.items()}

    def reference(self, client: Client, public: PublicExchange) -> Reference:
        """The previous representations of Eq. 2."""
        return Stored({}) if self.intra is None else self.intra.reference(client, public)

    def loss(self, client: Client, batch: Batch, targets: Mapping[str, Distinct], reference: Reference) -> Tensor:
        """Sum over the client's modalities of the contrasts: Eq. 1 with each other modality, and Eq. 2.

        Args:
            client: The client in training.
            batch: Batch of the exchanged samples.
            targets: The server's representations of the exchanged samples.
            reference: The client's previous representations.
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
    server weighs what they return by its contrast with the paired modality (Eq. 4-6) and distils it (Eq. 7).

    Numbers at statements are lines of the paper's Algorithm 1. Defaults follow the paper, and the released code where
    the paper is silent (E, gamma, batch size, unit norm); where both differ, the released behaviour is an option of a
    section, bundled in the preset ``creamfl-released``. reamFL (no contrasts) is ``contrast: null``.

    >>> method = CreamFL(contrast={"weight": 0.1, "intra": None})
    >>> method.teacher.weights.component_name(), method.contrast.inter.tau, method.distiller.loss
    ('gca', 1.0, 'l2')
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = dict.fromkeys(("model", "optimizer", "previous"), Lifetime.RUN)
    takes_late_replies: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs per round")
    contrast: Contrast | None = Field(default=Contrast(), description="contrasts in local training; null: reamFL")
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(weights=GCA())
    task: ServerTask | None = ServerTask()
    distiller: Distiller | None = Distiller()

    def require(self, plan: FederationPlan) -> None:
        super().require(plan)
        if len(plan.server_modalities) < 2 and self.contrast is not None and self.contrast.inter is not None:
            raise ConfigError(
                f"contrasts between modalities need two, but server.model encodes {plan.server_modalities}; "
                "add an encoder, or set algorithm.contrast.inter=null"
            )

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """ServerExecutes, lines 3 to 13; S_t of line 5 is the cohort."""
        exchange = self.exchange(server)  # 3 and 4: I_glob, T_glob <- f_s(P; w^t); no local ones yet
        for reply in exchange.ask(cohort, self.fit, representations=exchange.pairs):  # 6-8: send these, train
            exchange.add(reply, reply.representations)  # 9 and 12: into I, T (Eq. 4-6), by I_glob, T_glob of 3
        self.train_task(server)  # 11: train w^t on P
        self.distil(server, exchange.targets())  # 13: w^t+1 <- w^t distils I, T (Eq. 7)

    # ---- client half

    @client_step(representations=Representations, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, representations: Representations) -> Reply:
        """ClientLocalTraining, lines 15 to 20."""
        regulariser = self.regulariser(client, self.public.from_wire(client, representations))
        trainer = client.trainer()
        client.model.train()
        for epoch in client.epochs(self.local_epochs):  # 16
            for private, public in self.batches(client, epoch):
                loss = torch.zeros((), device=client.device)
                if private is not None:
                    loss = loss + client.task_loss(private)
                if public is not None:
                    loss = loss + regulariser(public)
                trainer.step(loss)  # 17: one step on the sum of both (Eq. 3)
        own = self.public.client_outputs(client, representations.order, representations)  # 19: I_c, T_c <- f_c(P; w_c)
        if self.contrast is not None and self.contrast.intra is not None:
            self.contrast.intra.keep(client, self.public, own)
        return Reply(representations=own, num_examples=client.num_examples)  # 20

    def batches(self, client: Client, epoch: int) -> Iterator[Pair]:
        """Private and public batches of one epoch; reamFL has private ones only."""
        if self.contrast is None:
            return ((batch, None) for batch in client.batches(client.train, f"task-{epoch}"))
        return self.contrast.batches(client, self.public, epoch)

    def regulariser(self, client: Client, server_outputs: Mapping[str, Tensor]) -> Callable[[Batch], Tensor]:
        """gamma (l_inter + l_intra) of a public batch (Eq. 1-3), with the client's representations as they are now."""
        if (contrast := self.contrast) is None:
            return lambda batch: batch.no_loss
        targets = contrast.targets(client, self.public, server_outputs)
        reference = contrast.reference(client, self.public)
        return lambda batch: contrast.weight * contrast.loss(client, batch, targets, reference)
