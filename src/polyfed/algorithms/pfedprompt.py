"""pFedPrompt."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.aggregation.averagings.by_name import ByName
from polyfed.algorithms.algorithm import Client, Reply, WeightAveraging, Weights, client_query
from polyfed.algorithms.fedavg import FedAvg
from polyfed.core.errors import ConfigError
from polyfed.losses.precision import in_full_precision
from polyfed.models.adapters.prompts import require_prompts
from polyfed.models.heads import NamesHead, SimilarityHead
from polyfed.models.model import Model
from polyfed.tasks.classification import Classification


class PFedPrompt(FedAvg):
    """Prompts for all, attention for oneself (pFedPrompt; Guo et al., WWW 2023).

    Prompts of texts are averaged, what users agree on. A client's own pictures correct what they say of its test
    pictures, without any training: scores s_k become s_k + alpha sum_i exp(-beta (1 - cos(x, x_i))) [y_i = k] over its
    training samples, by the attention of Tip-Adapter (Zhang et al., ECCV 2022, Equations 3 and 4).

    Test metrics are a function of the training samples themselves, which noise in training does not hide.
    """

    needs_adapter: ClassVar[str] = "prompts"

    averaging: WeightAveraging = ByName()
    alpha: float = Field(default=1.0, ge=0, le=1e6, description="weight of the attention; 0: as promptfl")
    beta: float = Field(default=5.5, gt=0, le=1e6, description="how soon it fades with distance")

    def add_modules(self, model: Model) -> None:
        require_prompts(model.exchanged(), self.component_name())
        if not any(isinstance(head, NamesHead) for head in model.heads.values()):
            raise ConfigError(
                f"algorithm '{self.component_name()}' corrects scores of classes by their names; set task.names of a "
                "classification, or choose promptfl"
            )

    @client_query(float)
    def assess_global(self, client: Client, weights: Weights) -> Reply:
        """Evaluate the received prompts with the client's own attention on its test samples."""
        client.load_weights(weights)
        if client.test is None:
            return Reply()
        size = client.evaluation_batch
        with client.autocast():
            metrics = client.task.evaluate(client.model, self.own_head(client), client.test, batch_size=size)
        return Reply(**metrics)

    @torch.no_grad()
    def own_head(self, client: Client) -> AttentiveHead:
        """The client's classifier: the texts' with what its training samples say."""
        task, head = client.task, client.head
        assert isinstance(task, Classification)
        assert isinstance(head, NamesHead)
        client.model.eval()
        train = task.usable(client.train)
        features = [
            F.normalize(task.feature(client.model, client.head, batch.to(client.device)).float(), dim=-1)
            for batch in train.batches(client.evaluation_batch)
        ]
        labels = train.targets[task.target].long().to(client.device)
        shown = F.one_hot(labels, head.classes).float()
        return AttentiveHead(head.against(client.model), torch.cat(features), shown, self.alpha, self.beta)


class AttentiveHead(nn.Module):
    """Scores of texts, and those of the nearest of some labelled features.

    Args:
        texts: the scores of texts.
        features: [n, d], of unit norm.
        shown: their classes, one-hot [n, classes].
        alpha: weight of the attention.
        beta: how soon it fades with distance.
    """

    def __init__(self, texts: SimilarityHead, features: Tensor, shown: Tensor, alpha: float, beta: float) -> None:
        super().__init__()
        self.texts, self.features, self.shown = texts, features, shown
        self.alpha, self.beta = alpha, beta

    @property
    def classes(self) -> int:
        return self.texts.classes

    @in_full_precision
    def forward(self, embedding: Float[Tensor, "b d"]) -> Float[Tensor, "b classes"]:
        cosines = F.normalize(embedding, dim=-1) @ self.features.float().T
        scores: Tensor = self.texts(embedding)
        return scores + self.alpha * torch.exp(-self.beta * (1 - cosines)) @ self.shown.float()
