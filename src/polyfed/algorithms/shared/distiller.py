"""How a server learns on the public set: its own task, and the ensemble that it distils; parts that methods hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled, Rows, relational_losses
from polyfed.algorithms.algorithm import Algorithm, FederationPlan, Server
from polyfed.algorithms.shared.public_exchange import PublicExchange, fixed_sample, learnt, of_part, row_shares
from polyfed.algorithms.shared.teacher import Ensembles, Teacher
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.settings import TrainingSettings
from polyfed.federation.trainer import Trainer
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.model import CachedModel, Embedder

_SIMILARITY = 0.05


class ServerTask(Settings):
    """The server's own task, which it trains on the public set."""

    epochs: int = Field(default=1, ge=1, description="passes over P per round; with order joint those of the distiller")
    order: Literal["first", "last", "joint"] = Field(
        default="last",
        description="before the server's outputs are sent; after those of the clients arrive, before these are "
        "distilled; or in one pass and loss with the distillation",
    )

    @model_validator(mode="after")
    def _one_count_of_passes(self) -> Self:
        if self.order == "joint" and self.epochs != 1:
            raise ValueError(f"epochs {self.epochs} has no effect with order joint; set those of the distiller")
        return self


class Distiller(Settings):
    """Moves the server's outputs towards the targets, in passes of their own or together with its task."""

    loss: Literal[Distillation, "similarity"] = Field(
        default="l2",
        description="distance to the targets, l2: unsquared norm, mean over P; or similarity of samples to each other",
    )
    temperature: float | None = Field(default=None, gt=0, description="similarity: temperature; None: 0.05")
    weight: float = Field(default=1.0, ge=0, description="factor of the distillation loss")
    epochs: int = Field(default=1, ge=1, description="passes over P that distil per round")
    optimizer: Literal["own", "shared"] = Field(
        default="own", description="optimiser state of its own, or that of the server's task training"
    )
    training: TrainingSettings | None = Field(
        default=None, description="optimiser of the distillation; None: settings of the server's training"
    )

    @model_validator(mode="after")
    def _all_act(self) -> Self:
        if self.temperature is not None and self.loss != "similarity":
            raise ValueError(f"temperature has no effect with loss {self.loss}, only with loss similarity")
        if self.training is not None and self.optimizer == "shared":
            raise ValueError("training has no effect with optimizer shared; leave it out")
        return self

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
            server: Server of the run.
            public: Settings of the exchange.
            targets: Targets by output.
            task: The server's own task, trained here if its order is joint.
            diagnostic_samples: Number of samples on which the distance to the targets is measured before and after.
        """
        joint = is_joint(task)
        if not targets and not joint:
            return
        targets = learnt(targets)
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
        """Sum over modalities of the distance to the targets, for batches by part of the public set.

        Every row has the same weight, whatever its part; samples without a target do not count.
        """
        shares = row_shares({name: target.valid for name, target in targets.items()})
        # with gradient, and only of outputs that a client sent
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
            diagnosed = fixed_sample(server, len(samples), min(count, len(samples)))
            for index in torch.split(diagnosed, self.trainer(server)[1]):
                chosen, batch = samples.subset(index), samples.batch(index, modalities=()).to(server.device)
                for name, loss in self.distillation_losses(server.represent(chosen), batch, targets).items():
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
    outputs, rows = server.represent(samples.subset(index)), index.to(server.device)
    return {
        f"kd_distance_{when}.{name}": float(DISTILLATIONS["l2"](outputs[name], target.values[rows], target.valid[rows]))
        for name, target in targets.items()
    }


# ---- a method's task and distiller together


def is_joint(task: ServerTask | None) -> bool:
    """True if task and distillation share one pass."""
    return task is not None and task.order == "joint"


def compares_rows(distiller: Distiller | None) -> bool:
    """True if the server learns from each client's rows, not from their mean alone."""
    return distiller is not None and distiller.loss == "similarity"


def require_learning(
    task: ServerTask | None, distiller: Distiller | None, teacher: Teacher, *, clients_learn: bool = False
) -> None:
    """Check that the settings of a server's learning go together.

    Args:
        task: The server's task.
        distiller: The server's distiller.
        teacher: The teacher from which it learns.
        clients_learn: True if clients learn from the teacher as well.

    Raises:
        ValueError: A setting has no effect, or what it needs is missing.
    """
    if distiller is None:
        if is_joint(task):
            raise ValueError("task.order joint needs a distiller, in whose passes the task is trained; it is null")
        idle = [key for key in ("groups", "alignment") if getattr(teacher, key) is not None and not clients_learn]
        if idle:
            raise ValueError(f"teacher.{idle[0]} has no effect without a distiller; leave it out, or add a distiller")
    elif is_joint(task) and (distiller.training is not None or distiller.optimizer != "own"):
        raise ValueError("distiller.optimizer and .training have no effect with task.order joint; leave them out")


class PublicServer(Algorithm):
    """A method whose server learns on the public set P, from representations of it that clients return."""

    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True
    learns_parts: ClassVar[bool] = False
    """True if the server also learns from public samples without a partner."""

    if TYPE_CHECKING:  # each method has it with defaults of its own
        public: PublicExchange

    def require(self, plan: FederationPlan) -> None:
        """Check the federation, see ``Algorithm``, and that the public set suits it."""
        super().require(plan)
        self.public.require(plan, learns_parts=self.learns_parts)

    def setup(self, server: Server) -> None:
        """Check that the public set has what the method exchanges.

        Raises:
            ConfigError: The public set is too small.
        """
        self.public.require_samples(server)


class TaughtServer(PublicServer):
    """A method whose server learns its own task, and an ensemble of clients' representations of the public set P.

    Its ``round`` is made of ``exchange``, whose replies become targets, ``train_task`` and ``distil``.
    """

    learns_parts: ClassVar[bool] = True

    if TYPE_CHECKING:
        teacher: Teacher
        task: ServerTask | None
        distiller: Distiller | None

    @model_validator(mode="after")
    def _learns(self) -> Self:
        require_learning(self.task, self.distiller, self.teacher, clients_learn=self.clients_learn)
        return self

    @property
    def clients_learn(self) -> bool:
        """True if clients learn from the teacher as well."""
        return False

    @property
    def server_passes(self) -> int:
        own = 0 if self.task is None or is_joint(self.task) else self.task.epochs
        return own + (self.distiller.epochs if self.distiller is not None else 0)

    def require(self, plan: FederationPlan) -> None:
        """Check the federation, see ``PublicServer``, and that the teacher suits it."""
        super().require(plan)
        self.teacher.require(plan)

    def exchange(self, server: Server, *, largest: float = 1.0) -> Ensembles:
        """Begin the exchange of a round; with ``task.order: first`` the server trains its task before it.

        Args:
            server: Server of the run.
            largest: Largest norm of a client's row in a mean.
        """
        self._train(server, "first")
        return self.teacher.exchange(self.public, server, keep_rows=compares_rows(self.distiller), largest=largest)

    def warm_up(self, server: Server) -> dict[str, Ensembled]:
        """Begins a round without clients, and so without targets."""
        self._train(server, "first")
        return {}

    def train_task(self, server: Server) -> None:
        """Train the server's own task on P, unless ``task.order`` puts it elsewhere."""
        self._train(server, "last")

    def _train(self, server: Server, order: Literal["first", "last"]) -> None:
        if self.task is not None and self.task.order == order:
            server.fit(server.public_set, epochs=self.task.epochs)

    def distil(self, server: Server, targets: Mapping[str, Ensembled]) -> None:
        """Learn the targets on P, with ``task.order: joint`` together with the server's own task."""
        if self.distiller is not None:
            shown = self.teacher.diagnostic_samples
            self.distiller.distil(server, self.public, targets, task=self.task, diagnostic_samples=shown)


def on_all_samples(server: Server, public: PublicExchange, targets: Mapping[str, Ensembled]) -> Mapping[str, Ensembled]:
    """Targets on all of P, from those on the exchanged samples; the other samples have none."""
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
