"""How a server learns: its own task on the public set, and the ensemble that it distils; parts that methods hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled, Rows, relational_losses
from polyfed.algorithms.algorithm import Algorithm, FederationPlan, Server
from polyfed.algorithms.shared.public_exchange import (
    GALLERY,
    PublicExchange,
    fixed_sample,
    of_part,
    part_of,
    row_shares,
)
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Trainer
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.model import CachedModel, Embedder

_SIMILARITY = 0.05


class ServerTask(Settings):
    """The server's own task, which it trains on the public set."""

    epochs: int = Field(default=1, ge=1, description="passes over P a round; with order joint those of the distiller")
    order: Literal["first", "last", "joint"] = Field(
        default="last",
        description="before the server's outputs are sent; after clients' came back, before these are distilled; or in "
        "one pass and loss with the distillation",
    )

    @model_validator(mode="after")
    def _one_count_of_passes(self) -> Self:
        if self.order == "joint" and self.epochs != 1:
            raise ValueError(f"epochs {self.epochs} has no effect with order joint; set those of the distiller")
        return self

    def require(self, federation: FederationPlan | Server, public: PublicExchange) -> None:
        """Check that the server can train its task on the public set.

        Raises:
            ConfigError: its classes are to be learnt, and the public set has none.
        """
        if public.exchanges_scores and not public.has_classes(federation):
            raise ConfigError(
                "algorithm.task: the public set lacks the classes that the server is to learn; name their column under "
                "the source's targets, or set algorithm.task=null"
            )


class Distiller(Settings):
    """The server's outputs move towards the targets, in passes of their own or with its task."""

    loss: Literal[Distillation, "similarity"] = Field(
        default="l2",
        description="distance to the targets, l2: unsquared norm, mean over P; or similarity: which samples are alike",
    )
    temperature: float | None = Field(default=None, gt=0, description="similarity: temperature; None: 0.05")
    weight: float = Field(default=1.0, ge=0, description="factor of the distillation loss")
    epochs: int = Field(default=1, ge=1, description="passes over P that distil a round")
    optimizer: Literal["own", "shared"] = Field(
        default="own", description="optimiser state of its own, or that of the server's task training"
    )
    training: TrainingSettings | None = Field(
        default=None, description="optimiser of the distillation; None: settings of the server's training"
    )

    @model_validator(mode="after")
    def _all_act(self) -> Self:
        if self.temperature is not None and self.loss != "similarity":
            raise ValueError(f"temperature has no effect with loss {self.loss}; it is of loss similarity")
        if self.training is not None and self.optimizer == "shared":
            raise ValueError("training has no effect with optimizer shared; leave it out")
        return self

    def require(self, public: PublicExchange) -> None:
        """Check that the distance suits what crosses.

        Raises:
            ConfigError: it does not.
        """
        if self.loss == "kl" and not public.exchanges_scores:
            raise ConfigError("algorithm.distiller.loss is kl, which is of class scores alone; choose l2")
        if self.loss == "similarity" and public.exchanges_scores:
            raise ConfigError("algorithm.distiller.loss is similarity, which is of representations; choose kl")

    def distil(
        self,
        server: Server,
        public: PublicExchange,
        targets: Mapping[str, Ensembled],
        *,
        task: ServerTask | None = None,
        diagnostic_samples: int = 0,
    ) -> None:
        """Move the server's outputs on the exchanged samples towards the targets; the gallery is not learnt.

        Args:
            server: of the run.
            public: what was exchanged.
            targets: by output.
            task: the server's own; it is trained here if its order is joint.
            diagnostic_samples: on so many its distance to the targets is measured before and after.
        """
        joint = is_joint(task)
        targets = {name: target for name, target in targets.items() if part_of(name) != GALLERY}
        exchanged = of_part(targets)
        server.record(**self.distances(server, public, exchanged, diagnostic_samples, "before"))
        trainer, size = (server.trainer(), server.training.batch_size) if joint else self.trainer(server)
        # the task is trained on all of P
        samples = server.public_set if joint else public.drawn(server)
        if joint:
            targets = on_all_samples(server, public, targets)
        # without a target there is still the task to train, if it has no passes of its own
        epochs = self.epochs if targets or joint else 0
        for batches in public.part_passes(server, "distil", epochs, size, samples, targets):
            model = CachedModel(server.model)  # one encoding, and one draw of its dropout, for both losses
            losses = [server.task_loss(batches[""], model)] if joint else []
            losses.append(self.weight * self.distillation_loss(server, public, model, batches, targets))
            trainer.step(torch.stack(losses).sum())
        server.record(**self.distances(server, public, exchanged, diagnostic_samples, "after"))

    def trainer(self, server: Server) -> tuple[Trainer, int]:
        """The optimiser of the distillation and its batch size."""
        if self.optimizer == "shared":
            return server.trainer(), server.training.batch_size
        return server.trainer("distillation", self.training), (self.training or server.training).batch_size

    def distillation_loss(
        self,
        server: Server,
        public: PublicExchange,
        model: Embedder,
        batches: Mapping[str, Batch],
        targets: Mapping[str, Ensembled],
    ) -> Tensor:
        """Sum over modalities of the distance to the targets, from batches by part of the public set, by ``model``.

        Every row has the same weight, whatever its part; samples without a target do not count.
        """
        shares = row_shares({name: target.valid for name, target in targets.items()})
        # with gradient, and only of outputs that somebody sent
        rows = public.part_outputs(server, model, batches, targets)
        losses = [torch.zeros((), device=server.device)]
        for part, batch in batches.items():
            names = [name for name in rows if (name == part if part else "/" not in name)]
            outputs, own = {name: rows[name][0] for name in names}, {name: targets[name] for name in names}
            losses += [shares[name] * loss for name, loss in self.distillation_losses(outputs, batch, own).items()]
        return torch.stack(losses).sum()

    def distillation_losses(
        self, outputs: Mapping[str, Tensor], batch: Batch, targets: Mapping[str, Ensembled]
    ) -> dict[str, Tensor]:
        """The loss of each output of a batch that has a target; samples without a target do not count."""
        if self.loss == "similarity":
            return relational_losses(outputs, targets, batch.index, batch.items, self.temperature or _SIMILARITY)
        distance = DISTILLATIONS[self.loss]
        return {
            name: distance(outputs[name], target.values[batch.index], target.valid[batch.index])
            for name, target in targets.items()
        }

    def distances(
        self, server: Server, public: PublicExchange, targets: Mapping[str, Ensembled], count: int, when: str
    ) -> dict[str, float]:
        """``target_distances``; and ``kd_similarity_<when>.<output>`` if that is the loss, mean over batches."""
        measured = target_distances(server, public, targets, count, when)
        if measured and self.loss == "similarity":
            samples = public.drawn(server)
            losses: dict[str, list[Tensor]] = {name: [] for name in targets}
            chosen_ones = fixed_sample(server, len(samples), min(count, len(samples)))
            for index in torch.split(chosen_ones, self.trainer(server)[1]):
                chosen, batch = samples.subset(index), samples.batch(index, modalities=()).to(server.device)
                outputs = public.outputs_of(server, chosen)
                for name, loss in self.distillation_losses(outputs, batch, targets).items():
                    losses[name].append(loss)
            measured |= {f"kd_similarity_{when}.{name}": float(torch.stack(x).mean()) for name, x in losses.items()}
        return measured


def target_distances(
    server: Server, public: PublicExchange, targets: Mapping[str, Ensembled], count: int, when: str
) -> dict[str, float]:
    """``kd_distance_<when>.<output>``: mean distance of the server's outputs to the targets, on ``count`` samples."""
    samples = public.drawn(server)
    count = min(count, len(samples))
    if not count or not targets:
        return {}
    index = fixed_sample(server, len(samples), count)  # the same every round, or rounds could not be compared
    outputs, rows = public.outputs_of(server, samples.subset(index)), index.to(server.device)
    return {
        f"kd_distance_{when}.{name}": float(DISTILLATIONS["l2"](outputs[name], target.values[rows], target.valid[rows]))
        for name, target in targets.items()
    }


# ---- a method's task and distiller together


def is_joint(task: ServerTask | None) -> bool:
    """Whether task and distillation share one pass."""
    return task is not None and task.order == "joint"


def compares_rows(distiller: Distiller | None) -> bool:
    """Whether the server learns from each client's rows, not from their mean alone."""
    return distiller is not None and distiller.loss == "similarity"


def train_task(task: ServerTask | None, order: Literal["first", "last"], server: Server) -> None:
    """Passes over P with the server's own task, if that is its order."""
    if task is not None and task.order == order:
        server.fit(server.public_set, epochs=task.epochs)


def require_learning(
    task: ServerTask | None, distiller: Distiller | None, teacher: Teacher, *, others_learn: bool = False
) -> None:
    """Check that how the server learns is of one piece.

    Args:
        task: of the server.
        distiller: of the server.
        teacher: from which it learns.
        others_learn: whether clients learn from the teacher as well.

    Raises:
        ValueError: a setting has no effect, or what it needs is missing.
    """
    if distiller is None:
        if is_joint(task):
            raise ValueError("task.order joint needs a distiller, in whose passes the task is trained; it is null")
        idle = [key for key in ("groups", "alignment") if getattr(teacher, key) is not None and not others_learn]
        if idle:
            raise ValueError(f"teacher.{idle[0]} has no effect without a distiller; leave it out, or add a distiller")
    elif is_joint(task) and (distiller.training is not None or distiller.optimizer != "own"):
        raise ValueError("distiller.optimizer and .training have no effect with task.order joint; leave them out")


class TaughtServer(Algorithm):
    """A method whose server learns on the public set: its own task, and an ensemble of what clients say of it."""

    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True
    learns_parts: ClassVar[bool] = True
    """Whether the server also learns of public samples without a partner."""

    if TYPE_CHECKING:  # each method has them with defaults of its own
        public: PublicExchange
        teacher: Teacher
        task: ServerTask | None
        distiller: Distiller | None

    @property
    def server_passes(self) -> int:
        own = 0 if self.task is None or is_joint(self.task) else self.task.epochs
        return own + (self.distiller.epochs if self.distiller is not None else 0)

    def require(self, plan: FederationPlan) -> None:
        """See ``Algorithm``; all parts suit the federation, and each other."""
        super().require(plan)
        self.public.require(plan, learns_parts=self.learns_parts)
        if self.task is not None:
            self.task.require(plan, self.public)
        self.teacher.require(plan, self.public)
        if self.distiller is not None:
            self.distiller.require(self.public)

    def learn_from(self, targets: Mapping[str, Ensembled], server: Server) -> None:
        """The server's half after the clients': its own task, if that comes last, and the targets, if it distils."""
        train_task(self.task, "last", server)
        if self.distiller is not None:
            seen = self.teacher.diagnostic_samples
            self.distiller.distil(server, self.public, targets, task=self.task, diagnostic_samples=seen)

    def setup(self, server: Server) -> None:
        """Check that the public set has what the method exchanges.

        Raises:
            ConfigError: it has not.
        """
        self.public.require_samples(server)
        if self.task is not None:
            self.task.require(server, self.public)
        self.teacher.require_labels(server, self.public)


def on_all_samples(server: Server, public: PublicExchange, targets: Mapping[str, Ensembled]) -> Mapping[str, Ensembled]:
    """Targets on the exchanged samples as targets on all of P; the other samples have none."""
    total = len(server.public_set)
    if len(public.drawn(server)) == total:
        return targets
    index = server.exchanged_index(public.samples)

    def spread(rows: Tensor, fill: float = 0) -> Tensor:
        return rows.new_full((total, *rows.shape[1:]), fill).index_copy_(0, index.to(rows.device), rows)

    everywhere = dict(targets)
    for name, target in of_part(targets).items():
        own = {sender: Rows(spread(rows), spread(logs, -math.inf)) for sender, (rows, logs) in target.rows.items()}
        everywhere[name] = Ensembled(spread(target.values), spread(target.valid), own)
    return everywhere
