"""What methods' own losses take of a batch: embeddings of its samples, and BYOL between two views of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.algorithm import Client
from polyfed.core.settings import Settings
from polyfed.data.samples import Batch, Samples
from polyfed.losses.info_nce import info_nce
from polyfed.losses.self_supervised import TargetNetwork, symmetric_byol
from polyfed.models.model import CachedModel, Embedder, Model
from polyfed.tasks.classification import Classification
from polyfed.tasks.imputations import Embeddings, embeddings_of, of_both


@dataclass(frozen=True)
class SampleEmbeddings:
    """Embeddings of the samples of a batch that a client's task has a use for.

    Attributes:
        client: whose samples, model and task.
        batch: the samples.
        parts: modality -> embeddings of those that have it.
        fused: what the task classifies of each sample, as it does; None where it does not, or there is no sample.
    """

    client: Client
    batch: Batch
    parts: Embeddings
    fused: Float[Tensor, "b d"] | None = None

    @classmethod
    def of(cls, client: Client, model: CachedModel, batch: Batch) -> Self:
        if isinstance(client.task, Classification):
            own = client.task.classified(model, client.head, batch)
            return cls(client, own.batch, own.parts, own.feature if own.parts else None)
        batch = client.task.usable(batch)
        return cls(client, batch, embeddings_of(model, batch, client.modalities) if len(batch) else {})

    @property
    def is_fused(self) -> bool:
        """Whether that is of several modalities, not the embedding of one."""
        return isinstance(self.client.task, Classification) and self.client.task.modality is None

    @property
    def labels(self) -> Int64[Tensor, " b"]:
        assert isinstance(self.client.task, Classification)
        return self.batch.targets[self.client.task.target].long()

    def pairs(self) -> Iterator[tuple[Tensor, Tensor, Int64[Tensor, " k"]]]:
        """Embeddings [k, d] in each two modalities of the samples that have both, two at least, and their index."""
        for one, other in combinations(self.parts, 2):
            u, v, index = of_both(self.parts[one], self.parts[other], len(self.batch))
            if len(index) > 1:
                yield u, v, index

    def contrast(self, u: Tensor, v: Tensor, index: Int64[Tensor, " k"], tau: float) -> Float[Tensor, ""]:
        """InfoNCE of two sides of the samples at ``index``; captions of one item are not each other's negatives."""
        return info_nce(F.normalize(u, dim=1), F.normalize(v, dim=1), 1 / tau, self.batch.items[index])

    def mean(self, losses: list[Tensor]) -> Tensor:
        """Their mean; 0 without any."""
        return torch.stack(losses).mean() if losses else self.batch.no_loss


class Byol(Settings):
    """How BYOL trains beside other losses."""

    weight: float = Field(default=1.0, gt=0, description="factor of BYOL")
    momentum: float = Field(default=0.99, ge=0, le=1, description="of the target network, at each step")
    predictor_width: int = Field(default=4096, ge=1, description="hidden width of the predictors")


class SecondViews:
    """BYOL on modalities whose training view is random, so that two draws of it differ (Grill et al. 2020).

    The target network starts as a copy of the model's encoders; second views are drawn from ``stream``.
    """

    def __init__(
        self, samples: Samples, names: Sequence[str], model: Model, momentum: float, stream: torch.Generator
    ) -> None:
        self.names, self._samples, self._stream = names, samples, stream
        self.target = TargetNetwork({name: model.tower(name) for name in names}, momentum)

    def loss(self, model: Embedder, predictors: Mapping[str, nn.Module] | nn.ModuleDict, batch: Batch) -> Tensor:
        """The symmetric loss between the batch and a second view of its samples, summed over modalities."""
        again = self._samples.batch(batch.index.cpu(), self._stream, self.names).to(batch.index.device)
        losses = list[Tensor]()
        for name in self.names:
            first, second, predictor = batch.inputs[name], again.having(name).inputs[name], predictors[name]
            if len(second) < 2:
                continue
            first = batch.having(name).inputs[name]
            predictions = predictor(model.embed(name, first)), predictor(model.embed(name, second))
            with torch.no_grad():
                targets = self.target[name](first), self.target[name](second)
            losses.append(symmetric_byol(predictions, targets))
        return torch.stack(losses or [batch.no_loss]).sum()


def random_views(samples: Samples) -> list[str]:
    """Modalities whose training view takes anything from its random stream."""
    names = []
    for name in samples.modalities:
        # no view says of itself whether it is random: look whether making one moves the stream
        stream = torch.Generator()
        before = stream.get_state()
        rows = samples.rows[name]
        samples.inputs[name](rows[rows >= 0][:1], stream)
        if not torch.equal(before, stream.get_state()):
            names.append(name)
    return names
