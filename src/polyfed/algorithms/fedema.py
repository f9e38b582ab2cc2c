"""FedEMA: clients blend what they receive with what they kept (Zhuang et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Server, Weights, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.global_models import noted
from polyfed.algorithms.shared.second_views import SecondViews, random_views
from polyfed.core.effects import Not, Only
from polyfed.core.errors import ConfigError
from polyfed.data.samples import Batch
from polyfed.losses.byol import Predictor
from polyfed.models.model import Embedder, Model


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
        """As FedAvg, and record what clients report of their training.

        Raises:
            ConfigError: without a task there is nothing to train for a client, as only it can tell.
        """
        scalars: dict[str, list[float]] = {"byol": [], "blending": []}
        idle = []

        def note(reply: Reply) -> None:
            for name in scalars.keys() & reply.payload.scalars.keys():
                scalars[name].append(float(getattr(reply, name)))
            if self.task_weight == 0 and not reply.random_views:
                idle.append(reply.sender.id)

        super().aggregate(server, cohort, noted(replies, note))
        if idle:
            raise ConfigError(
                f"algorithm.task_weight is 0, and no training view of {', '.join(idle)} is random, so that there is "
                "nothing to train: set augment (pixels) or drop (tokens) in a view of theirs, or set task_weight"
            )
        means = {name: sum(values) / len(values) for name, values in scalars.items() if values}
        server.record(byol_clients=float(len(scalars["byol"])), **means)

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int, random_views=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Blend, then train; replies with the mean ``byol`` loss and with m (``blending``) where there are any."""
        m, model = self.blend(client, weights), client.model
        scalars = {} if m is None else {"blending": m}
        # without a random view both views are one, and BYOL has nothing to learn
        names = random_views(client.train) if self.byol_weight else []
        views = SecondViews(client.train, names, model, self.momentum, client.generator("second-views"))
        if "target" in client.state:
            views.target.load_state_dict(dict(client.state["target"]))
        predictors = {name: model.extras[f"predictor_{name}"] for name in names}
        losses: list[Tensor] = []

        def byol(model: Embedder, batch: Batch) -> Tensor:
            loss = views.loss(model, predictors, batch)
            losses.append(loss.detach())
            return self.byol_weight * loss

        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=self.task_weight,
            regulariser=byol if names else None,
            after_step=views.target.follow,
        )
        if losses:
            scalars["byol"] = float(torch.stack(losses).mean())
        if self.byol_weight:
            client.state["target"] = views.target.state_dict()
        trained = Weights(model.exchanged())
        return Reply(weights=trained, num_examples=client.num_examples, random_views=len(names), **scalars)

    def blend(self, client: Client, weights: Weights) -> float | None:
        """Load m W_k + (1 - m) W_g into the client's model and return m, or W_g and None the first time.

        The autoscaler sets lambda_k = tau / |W_g - W_k| at the first difference that there is.
        """
        kept = client.state.get("blending")
        if kept is None:
            client.load_weights(weights)
            client.state["blending"] = {"lambda": torch.zeros((), dtype=torch.float64)}  # 0: not known yet
            return None
        # of the kept model, which is still loaded
        gap = self.gap(client.model, weights)
        scale = float(kept["lambda"]) if self.lam is None else self.lam
        if self.lam is None and scale == 0 < gap:
            scale = self.tau / gap
            client.state["blending"] = {"lambda": torch.tensor(scale, dtype=torch.float64)}
        # beyond 1 a client would move away from the global model
        m = min(scale * gap, 1.0)
        client.load_weights(blended(client.model.exchanged(), weights, m))
        return m

    @torch.no_grad()
    def gap(self, model: Model, weights: Mapping[str, Tensor]) -> float:
        differences = [
            (weights[name].to(value.device) - value).float()
            for name, value in model.named_parameters()
            if name.startswith(("encoders.", "final_norm.")) and (self.divergence == "norm" or value.ndim > 1)
        ]
        norms = torch.stack([difference.norm() for difference in differences])
        return float(norms.norm() if self.divergence == "norm" else norms.mean())


def blended(own: Mapping[str, Tensor], received: Mapping[str, Tensor], m: float) -> dict[str, Tensor]:
    """m x own + (1 - m) x received, exactly either at m = 1 or 0; whole numbers as received."""
    return {
        name: torch.lerp(value.to(own[name].device), own[name], m) if value.is_floating_point() else value
        for name, value in received.items()
    }
