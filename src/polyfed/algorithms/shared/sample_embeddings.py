"""What a method's own loss takes of a batch: embeddings by modality, and what the task classifies of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.algorithms.algorithm import Client
from polyfed.data.samples import Batch
from polyfed.losses.info_nce import info_nce
from polyfed.models.model import CachedModel
from polyfed.tasks.classification import Classification
from polyfed.tasks.imputation import Embeddings, embeddings_of, of_both


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
        """Embeddings [k, d] in each two modalities of the samples that have both, two at least, and their places."""
        for one, other in combinations(self.parts, 2):
            u, v, places = of_both(self.parts[one], self.parts[other], len(self.batch))
            if len(places) > 1:
                yield u, v, places

    def contrast(self, u: Tensor, v: Tensor, places: Int64[Tensor, " k"], tau: float) -> Float[Tensor, ""]:
        """InfoNCE of two sides of the samples at ``places``; captions of one item are not each other's negatives."""
        return info_nce(F.normalize(u, dim=1), F.normalize(v, dim=1), 1 / tau, self.batch.items[places])

    def mean(self, losses: list[Tensor]) -> Tensor:
        """Their mean; 0 without any."""
        return torch.stack(losses).mean() if losses else self.batch.no_loss
