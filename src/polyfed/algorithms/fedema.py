"""FedEMA: clients blend what they receive with what they kept (Zhuang et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Lifetime, Reply, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.random_views import random_views
from polyfed.core.effects import Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.losses.byol import Predictor, TargetNetwork, symmetric_byol
from polyfed.models.model import Embedder, Model
from polyfed.wire.payload import Weights


class FedEMA(FedAvg):
    """Divergence-aware moving average of online encoders and predictors (Zhuang et al. 2022).

    Clients train BYOL on each modality whose training view is random (two draws of it; the embedding is the
    projection), beside their own task or, with ``task_weight`` 0, instead of it; with both it is FedAID's adaptation.
    A client without a random view trains its task alone. When it takes part again, W_k <- m W_k + (1 - m) W_g with
    m = min(lambda_k |W_g - W_k|, 1): one m, measured on the encoders, for all floating tensors of the model, that is
    encoders with their buffers, predictors and the task's head. The first time it takes W_g as it is.

    Online model and predictors cross both ways, targets never. Metrics: ``byol`` (mean loss), ``byol_clients`` (those
    with a random view) and ``blending`` (mean m of those who blended).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "model": Lifetime.RUN,
        "target": Lifetime.RUN,
        "blending": Lifetime.RUN,
    }

    task_weight: float = Field(default=1.0, ge=0, description="factor of the client's own task; 0: pure BYOL")
    byol_weight: float = Field(default=1.0, ge=0, description="factor of BYOL; 0: the task alone")
    lam: float | None = Field(default=None, ge=0, description="lambda, the same for all; None: autoscaler; 0: no blend")
    tau: Annotated[float, Only(lam=None)] = Field(
        default=0.7, gt=0, le=1, description="autoscaler: m of a client's first blending"
    )
    divergence: Annotated[Literal["norm", "mean_layer"], Only(lam=Not(0))] = Field(
        default="norm", description="L2 norm over the encoders, or mean of that of each matrix and kernel, as released"
    )
    momentum: Annotated[float, Only(byol_weight=Not(0))] = Field(
        default=0.99, ge=0, le=1, description="of the target network, at each step"
    )
    predictor_width: Annotated[int, Only(byol_weight=Not(0))] = Field(
        default=4096, ge=1, description="hidden width of the predictors"
    )

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        if self.task_weight == self.byol_weight == 0:
            raise ValueError("task_weight and byol_weight are both 0: there is nothing to train; set one above 0")
        return self

    def add_modules(self, model: Model) -> None:
        """A predictor for each modality; whether its view is random is not known here."""
        for modality in model.modalities:
            model.extras[f"predictor_{modality}"] = Predictor(model.dim, self.predictor_width)

    # ---- server half

    def aggregate(self, server: Server, cohort: Cohort, replies: Iterable[Reply]) -> None:
        """As FedAvg, and record what clients say of their training.

        Raises:
            ConfigError: without a task there is nothing to train for a client, as only it can tell.
        """
        scalars: dict[str, list[float]] = {"byol": [], "blending": []}
        super().aggregate(server, cohort, self._heard(replies, scalars))
        means = {name: sum(values) / len(values) for name, values in scalars.items() if values}
        server.record(byol_clients=float(len(scalars["byol"])), **means)

    def _heard(self, replies: Iterable[Reply], scalars: Mapping[str, list[float]]) -> Iterator[Reply]:
        idle = []
        for reply in replies:
            for name in scalars.keys() & reply.payload.scalars.keys():
                scalars[name].append(float(getattr(reply, name)))
            if self.task_weight == 0 and not reply.random_views:
                idle.append(reply.sender.id)
            yield reply
        if idle:
            raise ConfigError(
                f"algorithm.task_weight is 0, and no training view of {', '.join(idle)} is random, so that there is "
                "nothing to train: set augment (pixels) or drop (tokens) in a view of theirs, or set task_weight"
            )

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int, random_views=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Blend, then train; replies with the mean ``byol`` loss and with m (``blending``) where there are any."""
        m = self.blend(client, weights)
        scalars = {} if m is None else {"blending": m}
        pairs = ViewPairs(client, self.momentum) if self.byol_weight else None
        byol_losses = self._trained(client, pairs)
        if byol_losses:
            scalars["byol"] = float(torch.stack(byol_losses).mean())
        if pairs is not None:
            client.state["target"] = pairs.target.state_dict()
        views = len(pairs.names) if pairs is not None else 0
        trained = Weights(client.model.state_dict())
        return Reply(weights=trained, num_examples=client.num_examples, random_views=views, **scalars)

    def blend(self, client: Client, weights: Weights) -> float | None:
        """Load m W_k + (1 - m) W_g into the client's model and return m, or W_g and None the first time.

        The autoscaler sets lambda_k = tau / |W_g - W_k| at the first difference that there is.
        """
        kept = client.state.get("blending")
        if kept is None:
            client.load_weights(weights)
            client.state["blending"] = {"lambda": torch.zeros((), dtype=torch.float64)}  # not known yet
            return None
        gap = self.gap(client.model, weights)
        scale = float(kept["lambda"]) if self.lam is None else self.lam
        if self.lam is None and scale == 0 < gap:
            scale = self.tau / gap
            client.state["blending"] = {"lambda": torch.tensor(scale, dtype=torch.float64)}
        m = min(scale * gap, 1.0)
        client.load_weights(blended(client.model.state_dict(), weights, m))
        return m

    @torch.no_grad()
    def gap(self, model: Model, weights: Mapping[str, Tensor]) -> float:
        """|W_g - W_k| over the parameters of the encoders (and the norm that they share)."""
        differences = [
            (weights[name].to(value.device) - value).float()
            for name, value in model.named_parameters()
            if name.startswith(("encoders.", "final_norm.")) and (self.divergence == "norm" or value.ndim > 1)
        ]
        norms = torch.stack([difference.norm() for difference in differences])
        return float(norms.norm() if self.divergence == "norm" else norms.mean())

    def _trained(self, client: Client, pairs: ViewPairs | None) -> list[Tensor]:
        """Local training; gives the BYOL loss of each step, if there is any."""
        losses: list[Tensor] = []

        def byol(model: Embedder, batch: Batch) -> Tensor:
            assert pairs is not None
            loss = pairs(model, batch)
            losses.append(loss.detach())
            return self.byol_weight * loss

        def follow() -> None:
            if pairs is not None:
                pairs.target.follow()

        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=self.task_weight,
            regulariser=byol if pairs and pairs.names else None,
            after_step=follow,
        )
        return losses


class ViewPairs:
    """BYOL of a client in one step: second views of its batches, and the target network.

    Attributes:
        names: modalities whose training view is random.
        target: as kept, or else a copy of what the client received.
    """

    def __init__(self, client: Client, momentum: float) -> None:
        samples = client.train
        self.names = random_views(samples)
        self.target = TargetNetwork({name: client.model.tower(name) for name in self.names}, momentum)
        if "target" in client.state:
            self.target.load_state_dict(dict(client.state["target"]))
        self._client, self._stream = client, client.generator("second-views")

    def __call__(self, model: Embedder, batch: Batch) -> Tensor:
        """Sum over modalities of the symmetric loss between the batch and a second view of its samples."""
        again = self._client.train.batch(batch.index.cpu(), self._stream, self.names).to(self._client.device)
        losses = [self._loss(model, name, batch.inputs[name], again.inputs[name]) for name in self.names]
        return torch.stack(losses).sum()

    def _loss(self, model: Embedder, name: str, first: Tensor, second: Tensor) -> Tensor:
        predictor = self._client.model.extras[f"predictor_{name}"]
        predictions = predictor(model.embed(name, first)), predictor(model.embed(name, second))
        with torch.no_grad():
            targets = self.target[name](first), self.target[name](second)
        return symmetric_byol(predictions, targets)


def blended(own: Mapping[str, Tensor], received: Mapping[str, Tensor], m: float) -> dict[str, Tensor]:
    """m x own + (1 - m) x received, exactly either at m = 1 or 0; whole numbers as received."""
    return {
        name: torch.lerp(value.to(own[name].device), own[name], m) if value.is_floating_point() else value
        for name, value in received.items()
    }
