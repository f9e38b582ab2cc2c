"""Parts of FedAID and FedDRA: guidance by anchors of a teacher aligner, and weights of clients by their losses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.mean import WeightedMean
from polyfed.aggregation.robust import SMALLEST_WEIGHT, Divergence, chi_square, mirror_step_of
from polyfed.algorithms.algorithm import Algorithm, Client, ClientInfo, LocalEpochs, LocalSteps, Reply, Server, Weights
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.federation.plan import FederationPlan
from polyfed.federation.trainer import Regulariser
from polyfed.losses.distillation import GuidanceReduction, squared_distance
from polyfed.losses.info_nce import info_nce
from polyfed.models.aligner import Aligner
from polyfed.models.binding import Bound, EncoderFeatures, Parts, aligners_of
from polyfed.models.model import Embedder, Model
from polyfed.models.slots import model_slots
from polyfed.tasks.retrieval import PairTask

_W = "robust_weights"
_TEMPERATURE = 0.07


class AnchorGuidance(Settings):
    """L_guide: distance of representations to those of anchors, summed over modalities (Eq. 1)."""

    weight: float = Field(default=1.0, gt=0, description="factor of the guidance loss")
    distance: Literal["l2", "contrastive"] = Field(
        default="l2", description="distance to the anchors: squared, or InfoNCE (ablation)"
    )
    reduction: GuidanceReduction = Field(
        default="sum", description="reduction of squares (Eq. 1): sum over a batch, its mean, or over elements (FedDRA)"
    )

    def loss(self, client: Client, local: Bound, anchors: Bound, batch: Batch) -> Tensor:
        """L_guide of a batch, weighted."""
        losses = []
        for modality, own in batch.by_modality():
            x = own.inputs[modality]
            # both from one embedded batch: its EncoderFeatures are shared
            z, target = local.represent(modality, x), anchors.represent(modality, x)
            if self.distance == "l2":
                losses.append(squared_distance(z, target, self.reduction))
            else:
                siblings = client.task.siblings(own) if isinstance(client.task, PairTask) else None
                losses.append(info_nce(z, target, 1 / _TEMPERATURE, siblings))
        return self.weight * torch.stack(losses or [batch.no_loss]).sum()


class RobustWeights(Settings):
    """A weight w_k for every client, kept by the server, which grows with the client's loss (Eq. 4)."""

    gamma: float = Field(
        default=0.5, ge=0, le=1e3, description="step of w (Eq. 4); 0: w stays uniform. FedDRA's code: 0.01 x 50 steps"
    )
    rho: float = Field(default=1.0, ge=0, description="radius of the uncertainty set; 0: w stays uniform")
    divergence: Divergence = Field(
        default="chi_square",
        description="divergence that bounds w; none: the simplex alone (AFL), whatever rho; released: FedDRA's loose "
        "search for chi_square",
    )
    use: Literal["aggregate", "loss", "none"] = Field(
        default="aggregate",
        description="effect of w on the robust aligner: share in its mean, factor n w_k of the client's loss (the "
        "paper's Eq. 3 times n, and the released code; without effect under Adam), or none",
    )

    @model_validator(mode="after")
    def _has_a_search(self) -> Self:
        if self.divergence == "released" and self.rho == 0:
            raise ValueError("rho 0 with divergence 'released': its search fails there; use chi_square")
        return self

    def start(self, server: Server) -> None:
        """Starts from uniform w."""
        share = 1 / len(server.clients)
        # in fp64, in which the mirror step computes
        server.state[_W] = {client.id: torch.tensor(share, dtype=torch.float64) for client in server.clients}

    def mean(self, server: Server, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """sum_k w_k theta*_k over the clients that replied, with their w scaled to sum 1, or the uniform mean."""
        mean, weights = WeightedMean(), server.state[_W]
        for reply in replies:
            # a vanished w still counts: alone it gives the uniform mean, among others nothing visible
            share = max(float(weights[reply.sender.id]), SMALLEST_WEIGHT)
            mean.add(reply.weights, share if self.use == "aggregate" else 1.0)
        return mean.take()

    def loss_factor(self, server: Server) -> Callable[[ClientInfo], float]:
        """n w_k for every client, with mean one; one where w does not act on losses."""
        if self.use != "loss":
            return lambda client: 1.0
        return lambda client: len(server.clients) * float(server.state[_W][client.id])

    def step(self, server: Server, losses: Mapping[str, float]) -> None:
        """w <- Proj(w e^(gamma v) / sum) among the clients that reported their loss v (Eq. 4); records both.

        The sum of their weights stays, as nothing is known of the others.
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


class RobustAlignment(Algorithm):
    """Clients train one model whose encoders have align modules (``model.aligner``), guided by a robust teacher."""

    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = 50
    task_weight: float = Field(default=1.0, ge=0, description="alpha (Eq. 2), factor of the task's loss")
    guidance: AnchorGuidance | None = Field(default=AnchorGuidance(), description="guidance by the teacher; null: none")

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if self.guidance is None and self.task_weight == 0:
            raise ValueError("guidance is null and task_weight 0, so that no loss trains; set one of them")
        return self

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        """Check the federation, see ``Algorithm``: clients need two modalities, and one model with align modules."""
        super().require(plan)
        self._require_one({model.architecture: name for name, model in plan.models()}.values())
        for _, model in plan.models():
            self._require_aligned(list(model.encoders)[:1] if model.aligner is None else ())
        for client in plan.clients:
            if len(client.modalities) < 2:
                raise ConfigError(
                    f"algorithm '{self.component_name()}' aligns modalities, and clients of '{client.group}' have only "
                    f"'{client.modalities[0]}'; give them pairs, or choose another method"
                )

    def setup(self, server: Server) -> None:
        """Starts from one initial model for all.

        Raises:
            ConfigError: Clients differ in architecture or task, or lack align modules.
        """
        self._require_one(server.types)
        (clients,) = server.types.values()
        tensors = server.global_models.blueprints[clients.architecture].slots
        slots = {tensor.slot for tensor in tensors.values()}
        self._require_aligned([name for name in clients.modalities if (name, "aligner") not in slots])
        server.share_weights()

    def _require_one(self, types: Collection[str]) -> None:
        if len(types) > 1:
            raise ConfigError(
                f"algorithm '{self.component_name()}' trains one model, but there are clients of types "
                f"{', '.join(types)}; give all one architecture and task, and no other 'type'"
            )

    def _require_aligned(self, lacking: Sequence[str]) -> None:
        if lacking:
            raise ConfigError(
                f"algorithm '{self.component_name()}' needs an align module for '{lacking[0]}'; set aligner in "
                "clients' model (and in server.model)"
            )

    def average(self, replies: Iterable[Reply]) -> dict[str, Tensor]:
        """1/N sum_k (Theta_k, theta_k, heads): plain mean of the replies (FedAID, Algorithm 1, line 7)."""
        mean = WeightedMean()
        for reply in replies:
            mean.add(reply.weights, 1.0)
        return mean.take()

    # ---- client half

    def guided_task_loss(self, client: Client, local: Bound, anchors: Bound, batch: Batch) -> Tensor:
        """Guidance and task, each with its factor (Eq. 2)."""
        parts = []
        if self.task_weight:  # first: a task that looks at positions leaves its embeddings for the guidance
            parts.append(self.task_weight * client.task.loss(local, client.head, batch))
        if self.guidance:
            parts.append(self.guidance.loss(client, local, anchors, batch))
        return torch.stack(parts).sum()

    def anchored_loss(self, client: Client, anchors: Mapping[str, Aligner]) -> Callable[[Embedder, Batch], Tensor]:
        """Eq. 2 with anchors by other aligners on the client's moving encoder, to which gradient flows."""

        def loss(model: Embedder, batch: Batch) -> Tensor:
            features = EncoderFeatures(client.model)
            own = Bound(features, aligners_of(client.model))
            return self.guided_task_loss(client, own, Bound(features, anchors), batch)

        return loss


def only_type(server: Server) -> str:
    """The type of all clients."""
    return next(iter(server.types))


def server_parts(server: Server) -> Parts:
    """Tensors of the one model by part."""
    return Parts(server.global_models.blueprints[server.types[only_type(server)].architecture].slots)


def loss_reports(replies: Iterable[Reply]) -> dict[str, float]:
    """Maps senders to the losses v that they report."""
    return {reply.sender.id: reply.loss for reply in replies if "loss" in reply.payload.scalars}


def selected(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Weights:
    return Weights({name: tensors[name] for name in names})


def task_loss(client: Client) -> Callable[[Embedder, Batch], Tensor]:
    """The task's loss of the model under training; each input is encoded once."""
    return lambda model, batch: client.task.loss(local_view(client.model), client.head, batch)


@torch.no_grad()
def measured(client: Client, share: float, loss: Callable[[Model, Batch], Tensor]) -> dict[str, float]:
    """``loss``: mean over a share of the client's samples, in whole batches, evaluation mode and view.

    Empty without a batch.

    A contrast depends on the size of its batch: all are as large as in training, and at least one is measured. A client
    with fewer samples is measured on all of them, which flatters it.
    """
    # drawn anew each round: a share of the data is not always the same
    order = torch.randperm(len(client.train), generator=client.generator("measured"))
    size = client.training.batch_size
    count = max(1, round(share * len(order)) // size) * size
    client.model.eval()
    values: list[Tensor] = []
    sizes: list[int] = []
    for index in torch.split(order[:count], size):
        if len(index) > 1:  # a single sample has no negatives
            batch = client.train.batch(index).to(client.device)
            with client.autocast():
                values.append(loss(client.model, batch).float())
            sizes.append(len(index))
    if not sizes:
        return {}
    losses = torch.stack(values).cpu().double()  # one wait for a device, which may lack float64
    return {"loss": float(losses @ torch.tensor(sizes, dtype=torch.float64)) / sum(sizes)}


def train_part(
    client: Client, names: Iterable[str], steps: int, purpose: str, loss: Regulariser, factor: float
) -> Mapping[str, Tensor]:
    """``steps`` steps on ``factor`` times a loss that move the named tensors alone; returns the model after them."""
    trained = set(names)
    client.trainer(only=lambda name: name in trained)  # used by fit
    client.fit(
        client.train,
        epochs=1,
        steps=steps,
        purpose=purpose,
        task_weight=0,
        regulariser=lambda model, batch: factor * loss(model, batch),
    )
    return client.model.exchanged()


def parts_of(client: Client) -> Parts:
    """Tensors of a client's model by part; before its weights are loaded the client would build initial ones."""
    return Parts(model_slots(client.model))


def local_view(model: Model) -> Bound:
    """A model's own representations of a batch; each input is encoded once."""
    return Bound(EncoderFeatures(model), aligners_of(model))
