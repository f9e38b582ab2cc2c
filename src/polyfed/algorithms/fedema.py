"""FedEMA: clients blend what they receive with what they kept (Zhuang et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Server, Weights, client_step, each
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.shared.local_losses import Byol, SecondViews, random_views
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch
from polyfed.losses.self_supervised import Predictor
from polyfed.models.model import Embedder, Model


class Blending(Settings):
    """Blending of a client's own model with the received one when it takes part again: W_k <- m W_k + (1 - m) W_g.

    m = min(lambda_k |W_g - W_k|, 1): one m, measured on the encoders, for all floating tensors of the model, that is
    encoders with their buffers, predictors and the task's head.
    """

    lam: float | None = Field(default=None, gt=0, description="lambda; None: tau / |W_g - W_k| of the first blending")
    tau: float = Field(default=0.7, gt=0, le=1, description="m of a client's first blending; higher keeps more")
    divergence: Literal["norm", "mean_layer"] = Field(
        default="norm", description="L2 norm over the encoders, or mean of that of each matrix and kernel, as released"
    )

    def load(self, client: Client, weights: Weights) -> float | None:
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
        # beyond 1 the client would move away from the global model
        m = min(scale * gap, 1.0)
        client.load_weights(blended(client.model.exchanged(), weights, m))
        return m

    @torch.no_grad()
    def gap(self, model: Model, weights: Mapping[str, Tensor]) -> float:
        """|W_g - W_k| over the encoders."""
        differences = [
            (weights[name].to(value.device) - value).float()
            for name, value in model.named_parameters()
            if name.startswith(("encoders.", "final_norm."))
            and name in weights  # what is frozen is not sent
            and (self.divergence == "norm" or value.ndim > 1)
        ]
        norms = torch.stack([difference.norm() for difference in differences])
        return float(norms.norm() if self.divergence == "norm" else norms.mean())


class FedEMA(FedAvg):
    """Divergence-aware moving average of online encoders and predictors (Zhuang et al. 2022).

    Clients train BYOL on each modality whose training view is random (two draws of it; the embedding is the
    projection), in addition to their task (FedAID's adaptation) or, with ``task_weight`` 0, instead of it.
    A client without a random view trains its task alone. When it takes part again, it blends what it receives with what
    it kept; the first time it takes the global model as it is.

    Online model and predictors cross both ways, targets never. Metrics: ``byol`` (mean loss), ``byol_clients`` (those
    with a random view) and ``blending`` (mean m of those who blended).

    >>> method = FedEMA(task_weight=0.0, blending={"tau": 0.5})
    >>> method.byol.momentum, method.blending.divergence
    (0.99, 'norm')
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "target": Lifetime.RUN, "blending": Lifetime.RUN}

    task_weight: float = Field(default=1.0, ge=0, description="factor of the client's own task; 0: pure BYOL")
    byol: Byol | None = Field(default=Byol(), description="BYOL between two views; null: the task alone")
    blending: Blending | None = Field(default=Blending(), description="with the kept model; null: none, as FedAvg")

    @model_validator(mode="after")
    def _trains(self) -> Self:
        if self.task_weight == 0 and self.byol is None:
            raise ValueError("task_weight is 0 and byol null, so nothing would be trained; set one of them")
        return self

    def add_modules(self, model: Model) -> None:
        """A predictor for each modality; whether its view is random is not known here."""
        width = self.byol.predictor_width if self.byol else 0
        for modality in model.modalities if width else ():
            model.extras[f"predictor_{modality}"] = Predictor(model.dim, width)

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, blend and train, average; record what clients report of their training.

        Raises:
            ConfigError: a client without a task has no random view to train on, which only its reply shows.
        """
        means, idle = server.new_means(self.averaging, cohort), list[str]()
        scalars: dict[str, list[float]] = {"byol": [], "blending": []}
        for reply in cohort.ask(self.fit, weights=each(server.weights_for)):
            means[reply.type].add(reply.weights, reply.num_examples)
            for name in scalars.keys() & reply.payload.scalars.keys():
                scalars[name].append(float(getattr(reply, name)))
            if self.task_weight == 0 and not reply.random_views:
                idle.append(reply.sender.id)
        server.update_weights(server.averaged(self.averaging, means))
        if idle:
            raise ConfigError(
                f"algorithm.task_weight is 0, and no training view of {', '.join(idle)} is random, so that there is "
                "nothing to train: set augment (pixels) or drop (tokens) in a view of theirs, or set task_weight"
            )
        figures = {name: sum(values) / len(values) for name, values in scalars.items() if values}
        server.record(byol_clients=float(len(scalars["byol"])), **figures)

    # ---- client half

    @client_step(float, weights=Weights, num_examples=int, random_views=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Blend, then train; replies with the mean ``byol`` loss and with m (``blending``) where there are any."""
        scalars = self.received(client, weights)
        byol = ViewLoss(self.byol, client) if self.byol else None
        client.fit(
            client.train,
            epochs=self.local_epochs,
            steps=self.local_steps,
            task_weight=self.task_weight,
            regulariser=byol if byol and byol.views.names else None,
            after_step=byol.views.target.follow if byol else lambda: None,
        )
        if byol:
            client.state["target"] = byol.views.target.state_dict()
            scalars |= {"byol": float(torch.stack(byol.losses).mean())} if byol.losses else {}
        views = len(byol.views.names) if byol else 0
        return Reply(weights=client.weights, num_examples=client.num_examples, random_views=views, **scalars)

    def received(self, client: Client, weights: Weights) -> dict[str, float]:
        """Load the global model, blended where the client has one of its own; then m is ``blending``."""
        if self.blending is None:
            client.load_weights(weights)
            return {}
        m = self.blending.load(client, weights)
        return {} if m is None else {"blending": m}


class ViewLoss:
    """BYOL of a client as a regulariser that remembers its values; the target network lasts between rounds."""

    def __init__(self, settings: Byol, client: Client) -> None:
        # without a random view both views are one, and BYOL has nothing to learn
        names, model = random_views(client.train), client.model
        self.views = SecondViews(client.train, names, model, settings.momentum, client.generator("second-views"))
        if "target" in client.state:
            self.views.target.load_state_dict(dict(client.state["target"]))
        self.losses: list[Tensor] = []
        self._weight, self._predictors = settings.weight, {name: model.extras[f"predictor_{name}"] for name in names}

    def __call__(self, model: Embedder, batch: Batch) -> Tensor:
        loss = self.views.loss(model, self._predictors, batch)
        self.losses.append(loss.detach())
        return self._weight * loss


def blended(own: Mapping[str, Tensor], received: Mapping[str, Tensor], m: float) -> dict[str, Tensor]:
    """m x own + (1 - m) x received, exactly either at m = 1 or 0; whole numbers as received."""
    return {
        name: torch.lerp(value.to(own[name].device), own[name], m) if value.is_floating_point() else value
        for name, value in received.items()
    }
