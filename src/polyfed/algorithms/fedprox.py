"""FedProx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Reply, Weights, client_step
from polyfed.algorithms.fedavg import FedAvg


class FedProx(FedAvg):
    """Federated optimisation with a proximal term (Li et al., MLSys 2020, Algorithm 2).

    Clients minimise F_k(w) + (mu / 2) ||w - W||^2, W being the model that they received; all else is FedAvg. The
    term's gradient, mu (w - W), is added to that of the loss: parameters that the loss does not reach stay as in
    FedAvg.
    """

    mu: float = Field(default=0.001, ge=0, le=1e6, description="weight of the proximal term")
    norm: Literal["squared", "plain"] = Field(
        default="squared", description="of w - W; plain: un-squared, parameter by parameter, as FedCola's released code"
    )

    @client_step(weights=Weights, num_examples=int, mean_by="num_examples")
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Minimise h_k(w; W) = F_k(w) + (mu / 2) ||w - W||^2 from the received model W (Eq. 2)."""
        client.load_weights(weights)
        received = {name: value.detach().clone() for name, value in client.model.trained().items()}

        def correct(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
            for name, gradient in gradients.items():
                gradient.add_(self.pull(weights[name].detach() - received[name]), alpha=self.mu)

        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, correct=correct)
        return Reply(weights=client.weights, num_examples=client.num_examples)

    def pull(self, drift: Tensor) -> Tensor:
        """Gradient of ||w - W||^2 / 2, or of ||w - W|| / 2, by w; 0 at w = W for both."""
        if self.norm == "squared":
            return drift
        norm = torch.linalg.vector_norm(drift)
        return torch.where(norm > 0, drift / (2 * norm), 0)
