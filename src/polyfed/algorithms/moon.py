"""MOON."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from polyfed.algorithms.algorithm import Client, Lifetime, Reply, Weights, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.data.samples import Batch
from polyfed.federation.trainer import Regulariser
from polyfed.losses.contrast import model_contrast
from polyfed.models.model import CachedModel, Model


class MOON(FedAvg):
    """Model-contrastive federated learning (Li et al., CVPR 2021, Algorithm 1).

    Clients add mu l_con to their loss (Eq. 3-4): their representations are drawn to those of the received model, and
    away from those of their own model at the end of its previous participation. With several modalities l_con is the
    sum of one term for each; at the first participation there is none. All else is FedAvg.

    In the paper the contrast is on the output of a projection head, which the classifier stands on. Encoders here end
    in a projection to d themselves, and heads stand on that: by default, z is the embedding. ``projection`` asks for
    the paper's head in addition, between the embedding and the contrast alone.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"previous": Lifetime.RUN}

    mu: float = Field(default=1.0, ge=0, le=1e6, description="weight of the contrast; the paper tries 0.1, 1, 5, 10")
    tau: float = Field(default=0.5, gt=0, le=100, description="temperature of the contrast")
    projection: int | None = Field(default=None, ge=1, description="width of a projection head (paper: 256), or None")

    def add_modules(self, model: Model) -> None:
        for modality in model.modalities if self.projection is not None else ():
            layers = nn.Linear(model.dim, model.dim), nn.ReLU(), nn.Linear(model.dim, self.projection or 0)
            model.extras[_head(modality)] = nn.Sequential(*layers)

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model with the contrast; then remember the model."""
        client.load_weights(weights)
        regulariser = self.contrast(client) if self.mu else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=regulariser)
        trained = client.model.exchanged()
        client.state["previous"] = trained
        return Reply(weights=Weights(trained), num_examples=client.num_examples)

    def contrast(self, client: Client) -> Regulariser | None:
        """mu l_con between the client's model, as it trains, the one that it is now, and its previous one."""
        kept = client.state.get("previous")
        if not kept:
            return None
        received, previous = _frozen(client.model), _frozen(client.model)
        previous.load(kept)

        def loss(model: CachedModel, batch: Batch) -> Tensor:
            losses = []
            for modality, own in batch.by_modality():
                x = own.inputs[modality]
                z = project_embedding(model.model, modality, model.embed(modality, x))
                with torch.no_grad():
                    towards, away = (
                        project_embedding(other, modality, other.embed(modality, x)) for other in (received, previous)
                    )
                losses.append(model_contrast(z, towards, away, self.tau))
            return self.mu * torch.stack(losses or [batch.no_loss]).sum()

        return loss


def project_embedding(model: Model, modality: str, embedding: Tensor) -> Tensor:
    name = _head(modality)
    projected: Tensor = model.extras[name](embedding) if name in model.extras else embedding
    return projected


def _frozen(model: Model) -> Model:
    return copy.deepcopy(model).eval().requires_grad_(False)


def _head(modality: str) -> str:
    return f"projection_{modality}"
