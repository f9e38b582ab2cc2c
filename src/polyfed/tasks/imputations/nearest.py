"""What the nearest public sample has."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.samples import Samples
from polyfed.models.model import Embedder
from polyfed.tasks import evaluating
from polyfed.tasks.imputation import Embeddings, Imputation, Imputer, PresentEmbeddings, mean_of


class Neighbour(Imputation):
    """The embedding that the nearest public sample has in the lacking modality, by those that the sample has."""

    looks_in_public: ClassVar[bool] = True

    def require_public(self, modalities: Collection[str]) -> None:
        """See ``Imputation``."""
        if len(modalities) < 2:
            raise ConfigError(
                "task.imputation nearest takes a public set of several modalities; add a 'public' section of such a "
                "source, or choose another imputation"
            )

    def imputer(self, dim: int, modalities: Sequence[str], classes: int) -> Imputer:
        return _Nearest(modalities, self.dropout)


class _Nearest(Imputer):
    def __init__(self, modalities: Sequence[str], dropout: float) -> None:
        super().__init__(modalities, dropout)
        self._bank: dict[str, Tensor] = {}  # of the model as it was when the client's step began; no state

    def prepare(self, model: Embedder, public: Samples | None, batch_size: int) -> None:
        if public is None or not set(self.modalities) <= set(public.modalities):
            raise ConfigError(
                f"task.imputation nearest takes a public set with {list(self.modalities)}; add a 'public' section of "
                "such a source, or choose another imputation"
            )
        with evaluating(model, inference=False):
            batches = [batch.to(model.device) for batch in public.only(self.modalities).batches(batch_size)]
            self._bank = {
                name: torch.cat([model.embed(name, batch.inputs[name]).float() for batch in batches])
                for name in self.modalities
            }

    def fill(self, modality: str, places: Int64[Tensor, " k"], parts: Embeddings, count: int) -> Float[Tensor, "k d"]:
        if not self._bank:
            raise ConfigError(
                "task.imputation nearest looks in the public set as the client's own model sees it, which a saved "
                "model has not; choose another imputation"
            )
        near = {
            name: PresentEmbeddings(
                F.normalize(part.values.detach().float(), dim=-1) @ F.normalize(self._bank[name], dim=-1).T, part.places
            )
            for name, part in parts.items()
        }
        return self._bank[modality][mean_of(near, near, count)[places].argmax(1)]
