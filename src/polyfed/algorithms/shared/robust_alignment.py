"""What FedAID and FedDRA share: guidance by anchors of a teacher aligner, and weights of clients by their losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
from polyfed.aggregation.robust import SMALLEST_WEIGHT, Divergence, chi_square, mirror_step_of
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Cohort,
    Lifetime,
    LocalTraining,
    Reply,
    Server,
    Weights,
)
from polyfed.algorithms.shared.global_models import LocalEpochs
from polyfed.core.effects import Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import GuidanceReduction, squared_distance
from polyfed.losses.info_nce import info_nce
from polyfed.models.aligner import Aligner
from polyfed.models.binding import Bound, EncoderFeatures, Parts, aligners_of
from polyfed.models.model import Embedder, Model
from polyfed.models.slots import places
from polyfed.tasks.pairing import PairTask

_W = "robust_weights"

SQUARED = Only(guidance="l2", guidance_weight=Not(0))
CONTRASTIVE = Only(guidance="contrastive", guidance_weight=Not(0))


class RobustWeights(Algorithm):
    """Methods whose server keeps a weight w_k for every client, which grows with the client's loss (Eq. 4)."""

    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    gamma: Annotated[float, Only(rho=Not(0)) | Only(divergence="none")] = Field(
        default=0.5, ge=0, le=1e3, description="step of w (Eq. 4); 0: w stays uniform. FedDRA's code: 0.01 x 50 steps"
    )
    rho: Annotated[float, Only(divergence=Not("none"))] = Field(
        default=1.0, ge=0, description="radius of the uncertainty set; 0: w stays uniform"
    )
    divergence: Divergence = Field(
        default="chi_square",
        description="bounds w; none: the simplex alone (AFL); released: FedDRA's loose search for chi_square",
    )
    weight_use: Literal["aggregate", "loss", "both", "none"] = Field(
        default="aggregate",
        description="how w acts on the robust aligner: as share in its mean, as factor n w_k of the client's loss "
        "(without effect under Adam), both, or not at all",
    )
    measure_share: float = Field(
        default=1.0, gt=0, le=1, description="share of a client's training samples that its loss v is measured on"
    )

    @model_validator(mode="after")
    def _has_a_search(self) -> Self:
        if self.divergence == "released" and self.rho == 0:
            raise ValueError("rho 0 with divergence 'released': its search fails there; use chi_square")
        return self

    # ---- server half

    def setup(self, server: Server) -> None:
        """Common initial weights, and uniform w."""
        server.share_weights()
        share = 1 / len(server.clients)
        # in fp64, in which the mirror step computes
        server.state[_W] = {client.id: torch.tensor(share, dtype=torch.float64) for client in server.clients}

    def robust_mean(self, server: Server, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """sum_k w_k theta*_k over those who replied (their w together being 1), or the uniform mean."""
        mean, weights = WeightedMean(), server.state[_W]
        by_weight = self.weight_use in ("aggregate", "both")
        for reply in replies:
            # a w that has vanished still counts: alike where nobody has more, else for nothing that is seen
            mean.add(reply.weights, max(float(weights[reply.sender.id]), SMALLEST_WEIGHT) if by_weight else 1.0)
        return mean.take()

    def loss_factor(self, server: Server) -> Callable[[ClientInfo], float]:
        """n w_k for every client, whose mean is one; one where w is no factor of losses."""
        if self.weight_use not in ("loss", "both"):
            return lambda client: 1.0
        return lambda client: len(server.clients) * float(server.state[_W][client.id])

    def reweigh(self, server: Server, losses: Mapping[str, float]) -> None:
        """w <- Proj(w e^(gamma v) / sum) among the clients that reported their loss (Eq. 4), and record both.

        What these weigh together does not change: of the others nothing is known.
        """
        names = [client.id for client in server.clients]
        present = torch.tensor([name in losses for name in names])
        if not bool(present.any()):
            return
        w = torch.stack([server.state[_W][name].cpu() for name in names])
        v = torch.tensor([losses[name] for name in names if name in losses], dtype=torch.float64)
        moved = mirror_step_of(w, present, v, gamma=self.gamma, rho=self.rho, divergence=self.divergence)
        server.state[_W] = {name: value.clone() for name, value in zip(names, moved, strict=True)}
        server.record(
            **{f"loss.{name}": value for name, value in losses.items()},
            **{f"weight.{name}": float(value) for name, value in server.state[_W].items()},
            worst_loss=max(losses.values()),
            chi_square=float(chi_square(moved)),
        )

    # ---- client half

    @torch.no_grad()
    def measured(self, client: Client, loss: Callable[[Model, Batch], Tensor]) -> dict[str, float]:
        """``loss``: mean over the measured samples of a loss in evaluation mode and view; nothing without a batch.

        A contrast depends on the size of its batch, so that all are as large as in training, and one at least is
        measured; a client that cannot fill one is measured on all that it has, which flatters it.
        """
        # drawn anew each round, so that a share of the data is not always the same one
        order = torch.randperm(len(client.train), generator=client.generator("measured"))
        size = client.training.batch_size
        count = max(1, round(self.measure_share * len(order)) // size) * size
        client.model.eval()
        values: list[Tensor] = []
        sizes: list[int] = []
        for index in torch.split(order[:count], size):
            if len(index) > 1:  # a single sample has nothing to be contrasted with
                batch = client.train.batch(index).to(client.device)
                with client.autocast():
                    values.append(loss(client.model, batch).float())
                sizes.append(len(index))
        if not sizes:
            return {}
        losses = torch.stack(values).cpu().double()  # one wait for a device, which need not know float64
        return {"loss": float(losses @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)}


class RobustAlignment(RobustWeights):
    """Base of the methods that bind local alignment to a distributionally robust teacher.

    All clients train one model whose encoders have align modules (``model.aligner``).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "encoder": Lifetime.RUN,
        "aligner": Lifetime.ROUND,
        "teacher": Lifetime.ROUND,
    }

    local_steps: int | None = Field(
        default=50, ge=1, description="batches of guided training a round; None: local_epochs"
    )
    robust_steps: int = Field(default=50, ge=1, description="batches of the stage that learns the robust aligner")
    guidance_weight: float = Field(default=1.0, ge=0, description="factor of the guidance loss; 0: none")
    task_weight: float = Field(default=1.0, ge=0, description="alpha of Eq. 2, factor of the task's loss")
    guidance: Annotated[Literal["l2", "contrastive"], Only(guidance_weight=Not(0))] = Field(
        default="l2", description="distance to the anchors: squared, or InfoNCE (ablation)"
    )
    guidance_reduction: Annotated[GuidanceReduction, SQUARED] = Field(
        default="sum",
        description="of squared distances (Eq. 1, and Eq. 5): sum over a batch, its mean, or over elements (FedDRA)",
    )
    contrast_temperature: Annotated[float, CONTRASTIVE] = Field(
        default=0.07, ge=0.01, le=1, description="of contrastive guidance, and of L_CL in FedAID's second stage"
    )
    mean: Literal["uniform", "samples"] = Field(
        default="uniform", description="average of models over clients: all alike (paper), or by sample count"
    )

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if self.guidance_weight == self.task_weight == 0:
            raise ValueError("guidance_weight and task_weight are both 0: there is nothing to train; set one above 0")
        return self

    @property
    def local_training(self) -> LocalTraining:
        return LocalTraining(self.local_epochs, self.local_steps, self.robust_steps)

    # ---- server half

    def setup(self, server: Server) -> None:
        """One initial model for all, and uniform weights.

        Raises:
            ConfigError: clients differ in architecture or task, or lack align modules.
        """
        kind = self.kind(server)
        slots = {place.slot for place in server.blueprints[server.types[kind].architecture].places.values()}
        for modality in server.types[kind].modalities:
            if (modality, "aligner") not in slots:
                raise ConfigError(
                    f"algorithm '{self.component_name()}' needs an align module for '{modality}'; set aligner in "
                    "clients' model (and in server.model)"
                )
        if len(server.types[kind].modalities) < 2:
            raise ConfigError(
                f"algorithm '{self.component_name()}' aligns modalities, and clients of '{kind}' have only "
                f"'{server.types[kind].modalities[0]}'; give them pairs, or leave them to another method"
            )
        super().setup(server)

    @abstractmethod
    def round(self, server: Server, cohort: Cohort) -> None:
        """One communication round."""

    def kind(self, server: Server) -> str:
        """The one type of clients.

        Raises:
            ConfigError: there are several.
        """
        if len(server.types) > 1:
            raise ConfigError(
                f"algorithm '{self.component_name()}' trains one model, but there are clients of types "
                f"{', '.join(server.types)}; give all one architecture and task, and no other 'type'"
            )
        return next(iter(server.types))

    def parts(self, server: Server) -> Parts:
        return Parts(server.blueprints[server.types[self.kind(server)].architecture].places)

    def averaged(self, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """Mean of the replies' weights, as they come."""
        mean = WeightedMean()
        for reply in replies:
            mean.add(reply.weights, 1.0 if self.mean == "uniform" else reply.num_examples)
        return mean.take()

    # ---- client half

    def local_loss(self, client: Client, local: Bound, anchors: Bound, batch: Batch) -> Tensor:
        """Guidance and task, each with its factor (Eq. 2)."""
        parts = []
        if self.task_weight:  # first: a task that looks at positions leaves embeddings for the other
            parts.append(self.task_weight * client.task.loss(local, client.head, batch))
        if self.guidance_weight:
            parts.append(self.guidance_weight * self.guidance_loss(client, local, anchors, batch))
        return torch.stack(parts).sum()

    def anchored_loss(self, client: Client, anchors: Mapping[str, Aligner]) -> Callable[[Embedder, Batch], Tensor]:
        """Eq. 2 with anchors that other aligners give of the client's moving encoder, to which gradient flows."""

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features = EncoderFeatures(client.model)
            return self.local_loss(client, Bound(features, aligners_of(client.model)), Bound(features, anchors), batch)

        return loss

    def guidance_loss(self, client: Client, local: Bound, anchors: Bound, batch: Batch) -> Tensor:
        """L_guide: distance of local and anchor representations, summed over modalities (Eq. 1)."""
        losses = []
        for modality, x in batch.inputs.items():
            # both of one embedded batch: an EncoderFeatures is made for it and shared
            z, target = local.represent(modality, x), anchors.represent(modality, x)
            if self.guidance == "l2":
                losses.append(squared_distance(z, target, self.guidance_reduction))
            else:
                siblings = client.task.siblings(batch) if isinstance(client.task, PairTask) else None
                losses.append(info_nce(z, target, 1 / self.contrast_temperature, siblings))
        return torch.stack(losses).sum()

    def train_part(
        self, client: Client, names: Iterable[str], purpose: str, loss: Regulariser, factor: float
    ) -> Mapping[str, Tensor]:
        """``robust_steps`` steps on ``factor`` times a loss that move the named tensors alone; the model after them."""
        trained = set(names)
        client.trainer(only=lambda name: name in trained)  # what fit will use
        client.fit(
            client.train,
            epochs=1,
            steps=self.robust_steps,
            purpose=purpose,
            task_weight=0,
            regulariser=lambda model, batch: factor * loss(model, batch),
        )
        return client.model.exchanged()


def task_loss(client: Client) -> Callable[[Embedder, Batch], Tensor]:
    """The task's loss of the model under training, each input encoded only once."""
    return lambda model, batch: client.task.loss(local_view(client.model), client.head, batch)


def selected(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Weights:
    return Weights({name: tensors[name] for name in names})


def parts_of(client: Client) -> Parts:
    """Which tensors of a client's model are what; a client that has not loaded its weights would build initial ones."""
    return Parts(places(client.model))


def local_view(model: Model) -> Bound:
    """A model's own representations of a batch, each input encoded only once."""
    return Bound(EncoderFeatures(model), aligners_of(model))


def loss_reports(replies: Iterable[Reply]) -> dict[str, float]:
    return {reply.sender.id: reply.loss for reply in replies if "loss" in reply.payload.scalars}
