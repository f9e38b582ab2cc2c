"""FedProx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.algorithms.algorithm import Client, Reply, Weights, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.wire.payload import grouped


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
        trained = client.model.trained()
        with torch.no_grad():
            received = dict(zip(trained, torch._foreach_clone([*trained.values()]), strict=True))

        @torch.no_grad()
        def correct(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
            for names in grouped(gradients):
                drifts = torch._foreach_sub([weights[name] for name in names], [received[name] for name in names])
                torch._foreach_add_([gradients[name] for name in names], self.pull(drifts), alpha=self.mu)

        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, correct=correct)
        return Reply(weights=client.weights, num_examples=client.num_examples)

    def pull(self, drifts: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of ||w - W||^2 / 2, or of ||w - W|| / 2, by w; 0 at w = W for both."""
        if self.norm == "squared":
            return [*drifts]
        norms = torch._foreach_norm([*drifts])
        return [torch.where(norm > 0, drift / (2 * norm), 0) for drift, norm in zip(drifts, norms, strict=True)]
