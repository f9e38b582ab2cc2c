"""CreamFL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count, islice
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.ensemble import Ensemble
from polyfed.aggregation.gca import Backend, contrastive_scores
from polyfed.algorithms.algorithm import Algorithm, Lifetime, Reply, client_step
from polyfed.data.samples import Batch
from polyfed.errors import ConfigError
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.mixing import Pair, interleave
from polyfed.federation.payload import Representations
from polyfed.federation.reference import FrozenCopy, Reference, Stored
from polyfed.federation.server import Server
from polyfed.federation.settings import TrainingSettings
from polyfed.losses.contrast import inter_modal, intra_modal
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.randomness import generator


@dataclass(frozen=True)
class Gathered:
    """The clients' representations of one modality, and who sent them."""

    ensemble: Ensemble
    senders: list[str] = field(default_factory=list)


class CreamFL(Algorithm):
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
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs a round")
    inter: bool = Field(default=True, description="inter-modal contrast (Eq. 1) in local training")
    intra: bool = Field(default=True, description="intra-modal contrast (Eq. 2) in local training")
    gamma: float = Field(default=0.5, ge=0, description="weight of the contrasts (Eq. 3)")
    tau_inter: float = Field(default=1.0, gt=0, description="temperature of Eq. 1; released code 0.5")
    tau_intra: float = Field(default=1.0, gt=0, description="temperature of Eq. 2; released code 0.5")
    mask_siblings: bool = Field(default=False, description="leave captions of the same picture out of Eq. 1's sum")
    local_reg: Literal["joint", "separate_pass"] = Field(
        default="joint",
        description="add the contrasts to the task loss (Eq. 3), or a pass of their own after it",
    )
    public_batch_size: int = Field(default=128, ge=2, description="public samples a step of local training")
    public_batches_per_epoch: int | None = Field(
        default=None,
        ge=1,
        description="joint: None gives every private step one; separate pass: None takes all of P",
    )
    public_augment: bool = Field(
        default=False, description="training view of public samples in contrasts and in (joint) distillation"
    )
    i_prev: Literal["cached", "on_the_fly"] = Field(
        default="cached",
        description="previous representations: those uploaded last, or recomputed batch by batch",
    )
    extraction: Literal["eval", "train"] = Field(
        default="eval", description="mode and view in which exchanged representations are computed"
    )
    aggregation: Literal["gca", "mean", "count", "iot"] = Field(
        default="gca",
        description="weights over clients: contrast (Eq. 4-5), equal, sample count, count x iot_factor",
    )
    iot_factor: float = Field(default=100.0, gt=0, description="FedIoT's factor for clients of several modalities")
    tau_agg: float = Field(default=1.0, gt=0, description="temperature of Eq. 4; below about 0.1 it selects")
    include_self: bool = Field(default=False, description="keep j = k in the sum of Eq. 4, as released")
    score_backend: Backend = Field(default="exact", description="how Eq. 4 is evaluated")
    server_first: bool = Field(default=False, description="train on P before the broadcast, as released, not after")
    server_epochs: int = Field(default=1, ge=0, description="passes over P with the server's own task a round")
    kd_loss: Distillation = Field(default="l2", description="distance to the targets (Eq. 7); released code mse")
    kd_weight: float = Field(default=1.0, ge=0, description="factor of the distillation loss; released code 0.6")
    kd_epochs: int = Field(default=1, ge=0, description="passes over P that distil a round")
    kd_optimizer: Literal["own", "shared"] = Field(
        default="own", description="optimiser state of its own, or that of the server's task training"
    )
    distillation: TrainingSettings | None = Field(
        default=None, description="optimiser of the distillation; None: settings of the server's training"
    )
    kd_joint: bool = Field(default=False, description="one pass with task and distillation loss together")
    renormalise_target: bool = Field(default=False, description="scale aggregated targets to unit length")
    diagnostic_samples: int = Field(default=1024, ge=0, description="public samples on which KD progress is measured")

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check that there is something to contrast with."""
        if len(server.model.modalities) < 2 and (self.inter or self.aggregation == "gca"):
            raise ConfigError(
                f"contrasts between modalities need two, but server.model encodes {list(server.model.modalities)}; "
                "add an encoder, or set algorithm.inter=false and algorithm.aggregation=mean"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Algorithm 1."""
        if self.server_first and not self.kd_joint:
            server.fit(server.public_set, epochs=self.server_epochs)
        known = server.represent_public(training=self.extraction == "train")
        targets = self.aggregate(server, cohort, known)
        if not self.server_first and not self.kd_joint:
            server.fit(server.public_set, epochs=self.server_epochs)
        self.distil(server, targets)

    def aggregate(self, server: Server, cohort: Cohort, known: Representations) -> dict[str, Tensor]:
        """Ask the cohort to train, and fold its representations into one target a modality (Eq. 4-6).

        A modality that nobody sent has no target.
        """
        gathered: dict[str, Gathered] = {}
        for reply in cohort.ask(self.fit, check=_same_public(server, known), representations=known):
            self.gather(server, reply, known, gathered)
        return self.targets(server, gathered)

    def gather(self, server: Server, reply: Reply, known: Representations, gathered: dict[str, Gathered]) -> None:
        """Fold one client's representations into the ensembles of their modalities."""
        for modality, values in reply.representations.items():
            if modality not in gathered:
                gathered[modality] = Gathered(self._ensemble(server, known[modality]))
            local = values.to(server.device)
            gathered[modality].ensemble.add(local, self.log_weights(server, reply, modality, local, known))
            gathered[modality].senders.append(reply.sender.id)

    def targets(self, server: Server, gathered: Mapping[str, Gathered]) -> dict[str, Tensor]:
        """What the server is to learn, by modality; records who sent and with which weight."""
        for modality, found in gathered.items():
            server.arrays[f"weights.{modality}"] = (found.ensemble.weights(), found.senders)
        server.record(**{f"senders.{name}": float(len(found.senders)) for name, found in gathered.items()})
        return {name: self._target(found.ensemble.result().values) for name, found in gathered.items()}

    def _ensemble(self, server: Server, known: Tensor) -> Ensemble:
        record = self._sample(server, min(256, len(known)))  # for the heat map of weights
        return Ensemble(len(known), known.shape[1], server.device, record=record)

    def log_weights(
        self, server: Server, reply: Reply, modality: str, local: Tensor, known: Representations
    ) -> Tensor | float:
        """Unnormalised log-weight of a client, for all samples or one by one (Eq. 4, or an ablation)."""
        if self.aggregation == "gca":
            scores = [
                contrastive_scores(
                    local,
                    known[other],
                    tau=self.tau_agg,
                    include_self=self.include_self,
                    backend=self.score_backend,
                    generator=generator(server.clock.seed, server.clock.round, reply.sender.id, "scores"),
                )
                for other in known
                if other != modality
            ]
            return torch.stack(scores).mean(0)
        weight = 1.0 if self.aggregation == "mean" else float(reply.num_examples)
        if self.aggregation == "iot" and len(reply.sender.modalities) > 1:
            weight *= self.iot_factor
        return float(torch.tensor(weight).log())

    def distil(self, server: Server, targets: Mapping[str, Tensor]) -> None:
        """Move the server's representations towards the targets (Eq. 7)."""
        server.record(**self._distances(server, targets, "before"))
        shared = self.kd_optimizer == "shared" or self.kd_joint
        trainer = server.trainer() if shared else server.trainer("distillation", self.distillation)
        size = (server.training if shared else self.distillation or server.training).batch_size
        server.model.train()
        for epoch in range(self.kd_epochs if targets or self.kd_joint else 0):
            for batch in server.public_batches(f"distil-{epoch}", size, augment=self.public_augment):
                loss = self.kd_weight * self._distance(server, batch, targets)
                trainer.step(loss + server.task_loss(batch) if self.kd_joint else loss)
        server.record(**self._distances(server, targets, "after"))

    def _distance(self, server: Server, batch: Batch, targets: Mapping[str, Tensor]) -> Tensor:
        with server.autocast():
            parts = [
                DISTILLATIONS[self.kd_loss](server.model.represent(name, batch.inputs[name]), target[batch.index], None)
                for name, target in targets.items()
            ]
        return torch.stack(parts).sum() if parts else torch.zeros((), device=server.device)

    def _distances(self, server: Server, targets: Mapping[str, Tensor], when: str) -> dict[str, float]:
        count = min(self.diagnostic_samples, len(server.public_set))
        if not count:
            return {}
        index = self._sample(server, count)
        now = server.represent(server.public_set.subset(index), list(targets))
        found = {
            name: DISTILLATIONS["l2"](now[name], target[index.to(target.device)], None)
            for name, target in targets.items()
        }
        return {f"kd_distance_{when}.{name}": float(value) for name, value in found.items()}

    def _sample(self, server: Server, count: int) -> Tensor:
        """The same few public samples in every round."""
        order = torch.randperm(len(server.public_set), generator=generator(server.clock.seed, "diagnostic"))
        return order[:count].sort().values

    def _target(self, value: Tensor) -> Tensor:
        return torch.nn.functional.normalize(value, dim=-1) if self.renormalise_target else value

    # ---- client half

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """ClientLocalTraining of Algorithm 1: E epochs of Eq. 3, then representations of the public set."""
        known = {name: value.to(client.device) for name, value in representations.items()}
        reference = self._reference(client)
        trainer = client.trainer()
        client.model.train()
        for epoch in range(self.local_epochs):
            for private, public in self._steps(client, epoch):
                loss = torch.zeros((), device=client.device)
                if private is not None:
                    loss = loss + client.task_loss(private)
                if public is not None:
                    loss = loss + self.gamma * self.contrasts(client, public, known, reference)
                trainer.step(loss)
        own = client.represent(client.public_set, list(known), training=self.extraction == "train")
        if self.intra and self.i_prev == "cached":
            client.state["previous"] = own
        return Reply(
            representations=Representations(own, order=representations.order),
            num_examples=client.num_examples,
        )

    def contrasts(self, client: Client, batch: Batch, known: Mapping[str, Tensor], reference: Reference) -> Tensor:
        """Sum over the client's modalities of the inter-modal (Eq. 1) and intra-modal (Eq. 2) contrasts."""
        items = client.public_set.items.to(client.device) if self.mask_siblings else None
        total = torch.zeros((), device=client.device)
        for modality, inputs in batch.inputs.items():
            if modality not in known:  # the server does not encode it
                continue
            with client.autocast():
                local = client.model.represent(modality, inputs)
            if self.inter:
                for other in known:
                    if other != modality:
                        total = total + inter_modal(local, known[other], batch.index, tau=self.tau_inter, items=items)
            if self.intra:
                previous = reference(modality, batch)
                total = total + intra_modal(local, known[modality][batch.index], previous, tau=self.tau_intra)
        return total

    def _steps(self, client: Client, epoch: int) -> Iterator[Pair]:
        """Private and public batches of one epoch, as ``local_reg`` combines them."""
        private = client.batches(client.train, f"task-{epoch}")
        if not (self.inter or self.intra):
            yield from ((batch, None) for batch in private)
            return
        wanted, size, view = self.public_batches_per_epoch, self.public_batch_size, self.public_augment
        if self.local_reg == "separate_pass":
            yield from ((batch, None) for batch in private)
            public = client.public_batches(f"contrast-{epoch}", size, augment=view)
            yield from ((None, batch) for batch in islice(public, wanted))
        else:
            passes = (client.public_batches(f"contrast-{epoch}-{number}", size, augment=view) for number in count())
            yield from interleave(private, chain.from_iterable(passes), client.steps_an_epoch, wanted)

    def _reference(self, client: Client) -> Reference:
        if self.i_prev == "on_the_fly" and self.intra:
            return FrozenCopy(client.model)
        kept = client.state.get("previous", {})
        if self.intra and not kept:
            kept = client.represent(client.public_set)  # at first: those before training
        return Stored({name: value.to(client.device) for name, value in kept.items()})


def _same_public(server: Server, known: Representations) -> Callable[[Reply], None]:
    rows, dim = len(server.public_set), server.model.dim

    def check(reply: Reply) -> None:
        reply.require_examples()
        modalities = tuple(name for name in reply.sender.modalities if name in known)
        reply.representations.require(known.order, rows, dim, modalities)

    return check
