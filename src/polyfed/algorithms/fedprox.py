"""FedProx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.averagings.by_type import ByType
from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    WeightAveraging,
    Weights,
    client_step,
    each,
)


class FedProx(Algorithm):
    """Federated optimisation with a proximal term (Li et al., MLSys 2020, Algorithm 2).

    Clients minimise F_k(w) + (mu / 2) ||w - W||^2, W being the model that they received; all else is FedAvg. The
    term's gradient, mu (w - W), is added to that of the loss: parameters that the loss does not reach stay as in
    FedAvg.
    """

    takes_late_replies: ClassVar[bool] = True
    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    averaging: WeightAveraging = ByType()
    mu: float = Field(default=0.001, ge=0, le=1e6, description="weight of the proximal term")
    norm: Literal["squared", "plain"] = Field(
        default="squared", description="of w - W; plain: un-squared, parameter by parameter, as FedCola's released code"
    )

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"fit": "num_examples"}

    # ---- server half

    def setup(self, server: Server) -> None:
        server.share_weights(self.averaging)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Broadcast, train near what was received, average."""
        replies = cohort.ask(self.fit, check=server.weights_check(), weights=each(server.weights_for))
        server.average_weights(replies, cohort.clients, self.averaging)

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train the received model W with the gradient of the proximal term added to that of the loss."""
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
