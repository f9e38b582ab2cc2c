"""CreamFL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.distinct import Distinct
from polyfed.aggregation.ensemble import Ensembled
from polyfed.aggregation.weighting import Weighting
from polyfed.aggregation.weightings.gca import GCA
from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.ensemble_distillation import EnsembleDistillation
from polyfed.core.effects import Condition, Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch, Samples
from polyfed.federation.public_outputs import (
    FrozenCopy,
    Pair,
    PublicOutputs,
    Reference,
    Remembered,
    Stored,
    of_part,
)
from polyfed.losses.contrast import inter_modal, intra_modal

# clients contrast their representations with the server's
_CONTRASTS = Only(gamma=Not(0)) & (Only(inter=True) | Only(intra=True))


class CreamFL(EnsembleDistillation):
    """Contrastive representation ensemble and aggregation (Yu et al., ICLR 2023).

    A server model learns from clients of any modality, task and architecture that exchange only representations of a
    public set: clients train with contrastive regularisation towards the server's representations (Eq. 1-3), the
    server weighs what comes back by its contrast with the paired modality (Eq. 4-6) and distils it (Eq. 7).

    Defaults follow the paper; where the released code differs, the other behaviour is an option of the same name in
    the preset ``creamfl-released``. reamFL (no contrasts) is ``inter: false, intra: false``.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "model": Lifetime.RUN,
        "optimizer": Lifetime.RUN,
        "previous": Lifetime.RUN,
    }

    only_if: ClassVar[Mapping[str, Condition]] = {"public_augment": _CONTRASTS | Only(kd_epochs=Not(0))}

    inter: Annotated[bool, Only(gamma=Not(0))] = Field(
        default=True, description="inter-modal contrast (Eq. 1) in local training"
    )
    intra: Annotated[bool, Only(gamma=Not(0))] = Field(
        default=True, description="intra-modal contrast (Eq. 2) in local training"
    )
    gamma: Annotated[float, Only(inter=True) | Only(intra=True)] = Field(
        default=0.5, ge=0, description="weight of the contrasts (Eq. 3)"
    )
    tau_inter: Annotated[float, Only(inter=True, gamma=Not(0))] = Field(
        default=1.0, gt=0, description="temperature of Eq. 1; released code 0.5"
    )
    tau_intra: Annotated[float, Only(intra=True, gamma=Not(0))] = Field(
        default=1.0, gt=0, description="temperature of Eq. 2; released code 0.5"
    )
    intra_reduction: Annotated[Literal["sum", "mean"], Only(intra=True, gamma=Not(0))] = Field(
        default="sum",
        description="clients of several modalities: sum of the modalities' means of Eq. 2, or, as released, the mean "
        "over all their rows, which divides the sum by the number of modalities",
    )
    mask_siblings: Annotated[bool, Only(inter=True, gamma=Not(0))] = Field(
        default=False, description="leave captions of the same picture out of Eq. 1's sum"
    )
    local_reg: Annotated[Literal["joint", "separate_pass"], _CONTRASTS] = Field(
        default="joint",
        description="add the contrasts to the task loss (Eq. 3), or a pass of their own after it",
    )
    public_batch_size: Annotated[int, _CONTRASTS] = Field(
        default=128, ge=2, description="public samples a step of local training"
    )
    public_batches_per_epoch: Annotated[int | None, _CONTRASTS] = Field(
        default=None,
        ge=1,
        description="joint: None gives every private step one; separate pass: None takes all of P",
    )
    i_prev: Annotated[Literal["cached", "on_the_fly"], Only(intra=True, gamma=Not(0))] = Field(
        default="cached",
        description="previous representations: those uploaded last, or recomputed batch by batch",
    )
    aggregation: SerializeAsAny[Weighting] = Field(
        default=GCA(), description="weights over clients (Eq. 4-5): gca, or an ablation: mean, count, iot"
    )

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": "num_examples"} if self.sums_suffice else {}

    # ---- server half

    def setup(self, server: Server) -> None:
        super().setup(server)
        if len(server.model.modalities) < 2 and self.inter:
            raise ConfigError(
                f"contrasts between modalities need two, but server.model encodes {list(server.model.modalities)}; "
                "add an encoder, or set algorithm.inter=false"
            )

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Ensembled]:
        """Ask the cohort to train, and fold its representations into one target a modality (Eq. 4-6)."""
        ensembles = self.ensembles(server, server_outputs)
        check = self.outputs_check(server, server_outputs, "representations")
        sent = self.to_wire(server, of_part(server_outputs), server_outputs.order)
        for reply in cohort.ask(self.fit, check=check, representations=sent):
            ensembles.add(reply, reply.representations)
        return ensembles.targets()

    # ---- client half

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """ClientLocalTraining of Algorithm 1: E epochs of Eq. 3, then representations of the public set."""
        samples = client.exchanged(self.public_samples)
        goals = self.goals(client, samples, self.from_wire(client, representations))
        # before the first step: what Eq. 2 calls previous must not move with the model
        reference = self._reference(client, samples)
        trainer = client.trainer()
        client.model.train()
        for epoch in client.epochs(self.local_epochs):
            for private, public in self._steps(client, samples, epoch):
                # one step for both parts: Eq. 3 is a sum
                loss = torch.zeros((), device=client.device)
                if private is not None:
                    loss = loss + client.task_loss(private)
                if public is not None:
                    loss = loss + self.gamma * self.contrasts(client, public, goals, reference)
                trainer.step(loss)
        # with the trained model, Eq. 4 weighs what the client has become
        own = self.client_outputs(client, representations.order, representations)
        if self._caches:  # what is sent now is what Eq. 2 calls previous the next time
            client.state["previous"] = of_part(self.from_wire(client, own))
        return Reply(representations=own, num_examples=client.num_examples)

    def goals(self, client: Client, samples: Samples, server_outputs: Mapping[str, Tensor]) -> dict[str, Distinct]:
        """Modality -> the server's representations of the exchanged samples, as ``contrasts`` takes them."""
        places = self.places(client)
        items = samples.items if self.mask_siblings else None
        return {name: Distinct.of(rows, places.get(name), items) for name, rows in server_outputs.items()}

    def contrasts(self, client: Client, batch: Batch, goals: Mapping[str, Distinct], reference: Reference) -> Tensor:
        """Sum over the client's modalities of the inter-modal (Eq. 1) and intra-modal (Eq. 2) contrasts.

        ``batch`` is one of the exchanged samples, ``goals`` are of these. The intra-modal contrasts are summed or
        averaged, as ``intra_reduction`` says; the inter-modal ones always are summed.
        """
        total = torch.zeros((), device=client.device)
        shared = [name for name in batch.inputs if name in goals]  # those that the server encodes
        intra_factor = 1.0 if self.intra_reduction == "sum" else 1.0 / max(1, len(shared))
        for modality in shared:
            with client.autocast():
                local = client.model.represent(modality, batch.inputs[modality])
            for goal in [goals[other] for other in goals if other != modality] if self.inter else ():
                own = goal.places[batch.index]
                total = total + inter_modal(
                    local, goal.rows, own, tau=self.tau_inter, items=goal.items, counts=goal.counts
                )
            if self.intra:
                consensus, previous = goals[modality].of_samples(batch.index), reference(modality, batch)
                contrast = intra_modal(local, consensus, previous, tau=self.tau_intra)
                total = total + intra_factor * contrast
        return total

    def _steps(self, client: Client, samples: Samples, epoch: int) -> Iterator[Pair]:
        """Private and public batches of one epoch, as ``local_reg`` combines them."""
        private = client.batches(client.train, f"task-{epoch}")
        if not (self.gamma and (self.inter or self.intra)):
            yield from ((batch, None) for batch in private)
            return
        wanted, size, view = self.public_batches_per_epoch, self.public_batch_size, self.public_augment
        if self.local_reg == "separate_pass":
            yield from ((batch, None) for batch in private)
            public = client.public_batches(f"contrast-{epoch}", size, augment=view, samples=samples)
            yield from ((None, batch) for batch in islice(public, wanted))
        else:
            yield from self.mixed_batches(client, private, f"contrast-{epoch}", size, wanted, samples)

    @property
    def _looks_back(self) -> bool:
        return self.intra and self.gamma > 0

    @property
    def _caches(self) -> bool:
        """Whether what is sent is kept for the next time; the next time's public samples may be others."""
        return self._looks_back and self.i_prev == "cached" and self.public_samples is None

    def _reference(self, client: Client, samples: Samples) -> Reference:
        if self.i_prev == "on_the_fly" and self._looks_back:
            return FrozenCopy(client.model)
        kept = client.state.get("previous", {})
        if self._looks_back and not kept:  # those before training, which is where the last participation ended
            if not self.public_augment:
                # all of P would be more than its batches need
                return Remembered(client.model, self.output_kind.places(samples))
            kept = client.represent(samples)
        return Stored({name: value.to(client.device) for name, value in kept.items()})
