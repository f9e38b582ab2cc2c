"""What methods over a public set share: a server that trains on it, weighs what clients say of it, and distils that."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.ensemble import Ensemble, Ensembled
from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting
from polyfed.aggregation.weightings.mean import Mean
from polyfed.algorithms.algorithm import Algorithm, Lifetime, Reply
from polyfed.core.effects import Facts, Not, Only
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.samples import Batch
from polyfed.federation.cohort import Cohort
from polyfed.federation.participant import Trainer
from polyfed.federation.public_outputs import LogitKind, OutputKind, PublicOutputs, RepresentationKind, clip_row_norms
from polyfed.federation.server import Server
from polyfed.federation.settings import TrainingSettings
from polyfed.losses.distillation import DISTILLATIONS, Distillation

DISTILS = Only(kd_epochs=Not(0), kd_weight=Not(0))
"""The server learns from what clients say."""


@dataclass(frozen=True)
class Gathered:
    """What the clients said on one channel, and who did."""

    ensemble: Ensemble
    senders: list[str] = field(default_factory=list)


class EnsembleDistillation(Algorithm):
    """Personal clients of any architecture, and a server that distils an ensemble of what they say of a public set.

    A method replaces the client half and what the server asks for (``aggregate``); it may replace the weights
    (``aggregation``), and what the server makes of the targets (``distil``).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs a round")
    public_samples: int | None = Field(
        default=None, ge=2, description="so many public samples cross in a round, drawn anew each; None: all of P"
    )
    aggregation: Annotated[SerializeAsAny[Weighting], DISTILS] = Field(
        default=Mean(), description="weights over clients: gca, sed, entropy, variance, margin, mean, count, iot, ..."
    )
    extraction: Literal["eval", "train"] = Field(
        default="eval", description="mode and view in which exchanged representations are computed"
    )
    public_augment: Annotated[bool, Only(kd_epochs=Not(0))] = Field(
        default=False, description="training view of public samples in contrasts and in (joint) distillation"
    )
    server_first: Annotated[bool, Only(kd_joint=False, server_epochs=Not(0))] = Field(
        default=False, description="train on P before the broadcast, as released, not after"
    )
    server_epochs: Annotated[int, Only(kd_joint=False)] = Field(
        default=1, ge=0, description="passes over P with the server's own task a round"
    )
    kd_loss: Annotated[Distillation, DISTILS] = Field(
        default="l2", description="distance to the targets; l2: unsquared norm, mean over P"
    )
    kd_weight: Annotated[float, Only(kd_epochs=Not(0))] = Field(
        default=1.0, ge=0, description="factor of the distillation loss"
    )
    kd_epochs: int = Field(default=1, ge=0, description="passes over P that distil a round")
    kd_optimizer: Annotated[Literal["own", "shared"], Only(kd_joint=False, kd_epochs=Not(0))] = Field(
        default="own", description="optimiser state of its own, or that of the server's task training"
    )
    distillation: Annotated[TrainingSettings | None, Only(kd_joint=False, kd_optimizer="own", kd_epochs=Not(0))] = (
        Field(default=None, description="optimiser of the distillation; None: settings of the server's training")
    )
    kd_joint: bool = Field(default=False, description="one pass with task and distillation loss together")
    renormalise_target: Annotated[bool, DISTILS] = Field(
        default=False, description="scale aggregated targets to unit length"
    )
    diagnostic_samples: int = Field(default=1024, ge=0, description="public samples on which KD progress is measured")

    @property
    def form(self) -> OutputKind:
        """What crosses: representations, unless a method says otherwise."""
        return RepresentationKind()

    def facts_for(self, key: str) -> Facts:
        """What crosses, for weightings."""
        return {OF_REPRESENTATIONS: not isinstance(self.form, LogitKind)} if key == "aggregation" else {}

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check that public set, models and weights over clients suit each other.

        Raises:
            ConfigError: they do not.
        """
        if len(server.public_set) < 2:
            raise ConfigError(
                f"the public set has {len(server.public_set)} samples, too few to learn from; raise public.items"
            )
        if self.public_samples is not None and self.public_samples > len(server.public_set):
            raise ConfigError(
                f"algorithm.public_samples is {self.public_samples}, but the public set has {len(server.public_set)}; "
                "lower it, or leave it out for all"
            )
        self.form.require(server)
        if self.kd_loss == "kl" and self.form.anchors({"": torch.empty(0)}):
            raise ConfigError("algorithm.kd_loss is kl, which compares class scores, not representations; choose l2")
        scores = not self.form.anchors({"": torch.empty(0)})
        if self.aggregation.needs_partner and not scores and len(server.model.modalities) < 2:
            raise ConfigError(
                f"algorithm.aggregation '{self.aggregation.component_name()}' contrasts modalities, but server.model "
                f"encodes {list(server.model.modalities)}; add an encoder, or choose mean or sed"
            )
        if self.aggregation.needs_labels and scores and self.form.labels(server, server.public_set) is None:
            raise ConfigError(
                f"algorithm.aggregation '{self.aggregation.component_name()}' weighs scores by the true class, which "
                "the public set lacks; name its column under the source's targets, or choose mean or variance"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Train on P, ask the clients, distil their ensemble; with ``server_first: false`` train after the asking."""
        if self.server_first and not self.kd_joint:
            server.fit(server.public_set, epochs=self.server_epochs)
        targets = self.aggregate(server, cohort, self.known(server))
        if not self.server_first and not self.kd_joint:
            server.fit(server.public_set, epochs=self.server_epochs)
        self.distil(server, targets)

    def known(self, server: Server) -> PublicOutputs:
        """What the server itself says of the samples that are exchanged in this round."""
        samples = server.exchanged(self.public_samples)
        own = self.form.of(server, samples, training=self.extraction == "train")
        return self.form.bundle(own, server.order(self.public_samples))

    @abstractmethod
    def aggregate(self, server: Server, cohort: Cohort, known: PublicOutputs) -> dict[str, Ensembled]:
        """Ask the cohort, and fold what it says into one target a channel; a channel that nobody sent has none."""

    def check(self, server: Server, known: PublicOutputs, name: str) -> Callable[[Reply], None]:
        """Raises PayloadError for a reply whose field ``name`` is not what its sender was to say."""
        rows, width = next(iter(known.values())).shape

        def check(reply: Reply) -> None:
            getattr(reply, name).require(known.order, rows, width, self.form.channels(reply.sender, list(known)))

        return check

    def gather(
        self,
        server: Server,
        reply: Reply,
        said: Mapping[str, Tensor],
        known: PublicOutputs,
        gathered: dict[str, Gathered],
    ) -> None:
        """Fold what one client said into the ensembles of its channels; norms are clip_row_norms first."""
        for channel, rows in said.items():
            if channel not in gathered:
                gathered[channel] = Gathered(self._ensemble(server, known[channel]))
            values = clip_row_norms(rows.to(server.device), self.form.largest)
            evidence = self.evidence(server, reply, channel, values, known)
            gathered[channel].ensemble.add(values, self.aggregation.log_weights(evidence))
            gathered[channel].senders.append(reply.sender.id)

    def evidence(self, server: Server, reply: Reply, channel: str, values: Tensor, known: PublicOutputs) -> Evidence:
        """What the weight of a client may depend on."""
        samples = server.exchanged(self.public_samples)
        labels = self.form.labels(server, samples)
        return Evidence(
            values=values,
            channel=channel,
            known=self.form.anchors(known),
            examples=reply.num_examples,
            channels=len(reply.sender.modalities),
            labels=None if labels is None else labels.to(values.device),
            items=samples.items.to(values.device),
        )

    def targets(self, server: Server, gathered: Mapping[str, Gathered]) -> dict[str, Ensembled]:
        """What the server is to learn, by channel; records who sent and with which weight."""
        for channel, found in gathered.items():
            server.arrays[f"weights.{channel}"] = (found.ensemble.weights(), found.senders)
        server.record(**{f"senders.{name}": float(len(found.senders)) for name, found in gathered.items()})
        return {name: self._target(found.ensemble.result()) for name, found in gathered.items()}

    def distil(self, server: Server, targets: Mapping[str, Ensembled]) -> None:
        """Move what the server says of the exchanged samples towards the targets."""
        server.record(**self._distances(server, targets, "before"))
        trainer, size = self.distiller(server)
        samples = server.exchanged(self.public_samples)
        if self.kd_joint and len(samples) < len(server.public_set):  # the task is trained on all of P
            targets, samples = (
                _spread(targets, server.exchanged_index(self.public_samples), len(server.public_set)),
                server.public_set,
            )
        server.model.train()
        for epoch in server.epochs(self.kd_epochs if targets or self.kd_joint else 0):
            for batch in server.public_batches(f"distil-{epoch}", size, augment=self.public_augment, samples=samples):
                loss = self.kd_weight * self.distillation_loss(server, batch, targets)
                trainer.step(loss + server.task_loss(batch) if self.kd_joint else loss)
        server.record(**self._distances(server, targets, "after"))

    def distiller(self, server: Server) -> tuple[Trainer, int]:
        """The optimiser of the distillation and its batch size."""
        shared = self.kd_optimizer == "shared" or self.kd_joint
        trainer = server.trainer() if shared else server.trainer("distillation", self.distillation)
        return trainer, (server.training if shared else self.distillation or server.training).batch_size

    def distillation_loss(self, server: Server, batch: Batch, targets: Mapping[str, Ensembled]) -> Tensor:
        """Sum over channels of the distance to the targets; samples that nobody spoke for do not count."""
        found = self.form.outputs(server, batch, list(targets))
        parts = [
            DISTILLATIONS[self.kd_loss](found[name], target.values[batch.index], target.valid[batch.index])
            for name, target in targets.items()
        ]
        return torch.stack(parts).sum() if parts else torch.zeros((), device=server.device)

    # ---- details

    def _ensemble(self, server: Server, known: Tensor) -> Ensemble:
        record = self._sample(server, len(known), min(256, len(known)))  # for the heat map of weights
        return Ensemble(len(known), known.shape[1], server.device, record=record)

    def _distances(self, server: Server, targets: Mapping[str, Ensembled], when: str) -> dict[str, float]:
        samples = server.exchanged(self.public_samples)
        count = min(self.diagnostic_samples, len(samples))
        if not count or not targets:
            return {}
        index = self._sample(server, len(samples), count)
        now, there = self.form.of(server, samples.subset(index)), index.to(server.device)
        found = {
            name: DISTILLATIONS["l2"](now[name], target.values[there], target.valid[there])
            for name, target in targets.items()
        }
        return {f"kd_distance_{when}.{name}": float(value) for name, value in found.items()}

    def _sample(self, server: Server, total: int, count: int) -> Tensor:
        """The same few of the exchanged samples in every round."""
        order = torch.randperm(total, generator=generator(server.clock.seed, "diagnostic"))
        return order[:count].sort().values

    def _target(self, found: Ensembled) -> Ensembled:
        return (
            found._replace(values=torch.nn.functional.normalize(found.values, dim=-1))
            if self.renormalise_target
            else found
        )


def _spread(targets: Mapping[str, Ensembled], index: Tensor, total: int) -> dict[str, Ensembled]:
    """Targets of the samples at ``index`` as targets of the whole public set; the others have none."""
    found = {}
    for name, (values, valid) in targets.items():
        place = index.to(values.device)
        found[name] = Ensembled(
            values.new_zeros(total, values.shape[1]).index_copy_(0, place, values),
            valid.new_zeros(total).index_copy_(0, place, valid),
        )
    return found
