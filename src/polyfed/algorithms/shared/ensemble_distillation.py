"""Distillation of the clients' ensemble into the server's model, beside the server's own task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled, Rows
from polyfed.aggregation.relations import relational_losses
from polyfed.algorithms.algorithm import Cohort, Server
from polyfed.algorithms.shared.ensembles import COMPARING, EnsembleTeacher
from polyfed.algorithms.shared.public_exchange import DISTILS, PublicExchange, fixed_sample, row_shares
from polyfed.core.effects import Condition, Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.public_outputs import GALLERY, of_part, part_of
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Trainer
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.model import CachedModel, Embedder

OF_MEANS = Only(kd_loss=Not("similarity"))
"""The server learns the mean itself, not what is alike."""
MOVES = OF_MEANS | Only(aggregation=COMPARING) | Only(alignment="ridge")
"""Alignment moves what the server learns: a rotation changes nobody's own similarities."""


class ServerTask(PublicExchange):
    """Methods whose server also trains on the public set, with a task of its own."""

    server_epochs: int = Field(default=1, ge=0, description="passes over P with the server's own task a round")

    @property
    def server_passes(self) -> int:
        return self.server_epochs + super().server_passes

    def setup(self, server: Server) -> None:
        """Check also that the server can train its task on the public set.

        Raises:
            ConfigError: its classes are to be learnt, and the public set has none.
        """
        super().setup(server)
        if not self.exchanges_logits or not self.server_epochs:
            return
        if self.output_kind.labels(server, server.public_set) is None:
            raise ConfigError(
                f"algorithm.server_epochs is {self.server_epochs}, but the public set lacks the classes that the "
                "server is to learn; name their column under the source's targets, or set algorithm.server_epochs=0"
            )

    def round(self, server: Server, cohort: Cohort) -> None:
        """Ask the cohort, train on P, and learn from what clients sent."""
        # clients get what the server saw before this round's training; see server_first
        targets = self.aggregate(server, cohort, self.server_outputs(server))
        self.train_task(server)
        self.distil(server, targets)

    def train_task(self, server: Server) -> None:
        server.fit(server.public_set, epochs=self.server_epochs)


class AlternatingDistillation(ServerTask, EnsembleTeacher):
    """Methods whose server learns its task and the ensemble one after the other."""

    only_if: ClassVar[Mapping[str, Condition]] = {
        "renormalise_target": DISTILS & OF_MEANS,
        "alignment": DISTILS & MOVES,
    }

    server_first: Annotated[bool, Only(server_epochs=Not(0))] = Field(
        default=False, description="train on P before the broadcast, as released, not after"
    )
    kd_loss: Annotated[Literal[Distillation, "similarity"], DISTILS] = Field(
        default="l2",
        description="distance to the targets, l2: unsquared norm, mean over P; or similarity: which samples are alike",
    )
    kd_temperature: Annotated[float, DISTILS & Only(kd_loss="similarity")] = Field(
        default=0.05, gt=0, description="temperature of the similarities"
    )
    kd_optimizer: Annotated[Literal["own", "shared"], Only(kd_epochs=Not(0))] = Field(
        default="own", description="optimiser state of its own, or that of the server's task training"
    )
    distillation: Annotated[TrainingSettings | None, Only(kd_optimizer="own", kd_epochs=Not(0))] = Field(
        default=None, description="optimiser of the distillation; None: settings of the server's training"
    )

    @property
    def keeps_rows(self) -> bool:
        return self.kd_loss == "similarity"

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check also that the distance suits what crosses.

        Raises:
            ConfigError: it does not.
        """
        super().setup(server)
        if self.kd_loss == "kl" and not self.exchanges_logits:
            raise ConfigError("algorithm.kd_loss is kl, which compares class scores, not representations; choose l2")
        if self.kd_loss == "similarity" and self.exchanges_logits:
            raise ConfigError("algorithm.kd_loss is similarity, which compares representations, not scores; choose kl")

    def round(self, server: Server, cohort: Cohort) -> None:
        """Train on P, ask the cohort, distil its ensemble; with ``server_first: false`` train after the asking."""
        if not self.server_first:
            super().round(server, cohort)
            return
        self.train_task(server)
        self.distil(server, self.aggregate(server, cohort, self.server_outputs(server)))

    def departures(
        self, outputs: Mapping[str, Tensor], batch: Batch, targets: Mapping[str, Ensembled]
    ) -> dict[str, Tensor]:
        """``kd_loss`` of each output of a batch that has a target; samples without a target do not count."""
        if self.kd_loss == "similarity":
            return relational_losses(outputs, targets, batch.index, batch.items, self.kd_temperature)
        distance = DISTILLATIONS[self.kd_loss]
        return {
            name: distance(outputs[name], target.values[batch.index], target.valid[batch.index])
            for name, target in targets.items()
        }

    def distances(self, server: Server, targets: Mapping[str, Ensembled], when: str) -> dict[str, float]:
        """Also ``kd_similarity_<when>.<output>`` if it is the loss, mean over batches of the same samples."""
        measured = super().distances(server, targets, when)
        if measured and self.kd_loss == "similarity":
            samples = server.exchanged(self.public_samples)
            count = min(self.diagnostic_samples, len(samples))
            losses: dict[str, list[Tensor]] = {name: [] for name in targets}
            for index in torch.split(fixed_sample(server, len(samples), count), self.distiller(server)[1]):
                chosen, batch = samples.subset(index), samples.batch(index, modalities=()).to(server.device)
                outputs = self.output_kind.of(server, chosen)
                for name, loss in self.departures(outputs, batch, targets).items():
                    losses[name].append(loss)
            measured |= {f"kd_similarity_{when}.{name}": float(torch.stack(x).mean()) for name, x in losses.items()}
        return measured

    def distiller(self, server: Server) -> tuple[Trainer, int]:
        """The optimiser of the distillation and its batch size."""
        if self.kd_optimizer == "shared":
            return server.trainer(), server.training.batch_size
        return server.trainer("distillation", self.distillation), (self.distillation or server.training).batch_size


class EnsembleDistillation(AlternatingDistillation):
    """The server distils the ensemble: its outputs move towards the clients', in passes of their own or with its task.

    A method replaces the client half and what the server asks for (``aggregate``); it may replace the weights
    (``aggregation``).
    """

    only_if: ClassVar[Mapping[str, Condition]] = {
        "server_epochs": Only(kd_joint=False),
        "server_first": Only(kd_joint=False, server_epochs=Not(0)),
        "kd_optimizer": Only(kd_joint=False, kd_epochs=Not(0)),
        "distillation": Only(kd_joint=False, kd_optimizer="own", kd_epochs=Not(0)),
    }

    learns_parts: ClassVar[bool] = True

    kd_joint: bool = Field(default=False, description="one pass with task and distillation loss together")

    @property
    def server_passes(self) -> int:
        return self.kd_epochs if self.kd_joint else super().server_passes

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check also that the server trains at all.

        Raises:
            ConfigError: its task is left to passes of which there are none.
        """
        super().setup(server)
        if self.kd_joint and not self.kd_epochs:
            raise ConfigError(
                "algorithm.kd_epochs is 0, but with kd_joint the server trains in its passes alone; raise it, or set "
                "algorithm.kd_joint=false"
            )

    def train_task(self, server: Server) -> None:
        """Passes over P with the server's own task, unless the distillation has it."""
        if not self.kd_joint:
            super().train_task(server)

    def distil(self, server: Server, targets: Mapping[str, Ensembled]) -> None:
        """Move the server's outputs on the exchanged samples towards the targets; the gallery is not learnt."""
        targets = {name: target for name, target in targets.items() if part_of(name) != GALLERY}
        server.record(**self.distances(server, of_part(targets), "before"))
        trainer, size = self.distiller(server)
        samples, goals = server.exchanged(self.public_samples), targets
        if self.kd_joint and len(samples) < len(server.public_set):  # the task is trained on all of P
            index, samples = server.exchanged_index(self.public_samples), server.public_set
            scattered = {name: _scattered(target, index, len(samples)) for name, target in of_part(targets).items()}
            goals = targets | scattered
        # without a target there is still the task to train, if it has no passes of its own
        epochs = self.kd_epochs if targets or self.kd_joint else 0
        for batches in self.part_passes(server, "distil", epochs, size, samples, goals):
            model = CachedModel(server.model)  # one encoding, and one draw of its dropout, for both losses
            losses = [server.task_loss(batches[""], model)] if self.kd_joint else []
            losses.append(self.kd_weight * self.distillation_loss(server, model, batches, goals))
            trainer.step(torch.stack(losses).sum())
        server.record(**self.distances(server, of_part(targets), "after"))

    def distiller(self, server: Server) -> tuple[Trainer, int]:
        """The optimiser of the distillation and its batch size; jointly with the task, those of the task."""
        return (server.trainer(), server.training.batch_size) if self.kd_joint else super().distiller(server)

    def distillation_loss(
        self, server: Server, model: Embedder, batches: Mapping[str, Batch], targets: Mapping[str, Ensembled]
    ) -> Tensor:
        """Sum over modalities of the distance to the targets, from batches by part of the public set, by ``model``.

        Every row has the same weight, whatever its part; samples without a target do not count.
        """
        shares = row_shares({name: target.valid for name, target in targets.items()})
        # with gradient, and only of outputs that somebody sent
        rows = self.part_outputs(server, model, batches, targets)
        losses = [torch.zeros((), device=server.device)]
        for part, batch in batches.items():
            names = [name for name in rows if (name == part if part else "/" not in name)]
            outputs, own = {name: rows[name][0] for name in names}, {name: targets[name] for name in names}
            losses += [shares[name] * loss for name, loss in self.departures(outputs, batch, own).items()]
        return torch.stack(losses).sum()


def _scattered(target: Ensembled, index: Tensor, total: int) -> Ensembled:
    """Targets of the samples at ``index`` as targets of the whole public set; the others have none."""
    places = index.to(target.values.device)

    def spread(part: Tensor, fill: float = 0) -> Tensor:
        return part.new_full((total, *part.shape[1:]), fill).index_copy_(0, places, part)

    rows = {name: Rows(spread(own), spread(logs, -math.inf)) for name, (own, logs) in target.rows.items()}
    return Ensembled(spread(target.values), spread(target.valid), rows)
