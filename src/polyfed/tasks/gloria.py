"""GLoRIA's objective (Huang et al., ICCV 2021): contrasts of pictures with texts, and of regions with words."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.data.samples import Batch, Samples
from polyfed.losses.info_nce import Reduction, info_nce
from polyfed.losses.local_alignment import local_contrast
from polyfed.models.model import Embedder, Model
from polyfed.tasks.pairing import PairTask


class GLoRIA(PairTask):
    """global_weight L_global + local_weight L_local, both summed over the two directions, as in the released code.

    L_global is InfoNCE on the embeddings. L_local contrasts texts and pictures by how well the words of a text fit the
    regions that they attend to (``losses.local_alignment``). Regions are the positions of the first modality, words
    those of the second; a model must give both. Words here are tokens: the paper adds up the pieces of a word, which is
    left out. Metrics, which are of the embeddings alone, as ``PairTask`` says.
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ()

    global_weight: float = Field(default=1.0, ge=0, description="weight of the contrast of embeddings")
    local_weight: float = Field(default=1.0, ge=0, description="weight of the contrast of words and regions")
    global_scale: float = Field(default=10.0, gt=0, le=100, description="factor on cosines of embeddings")
    local_scale: float = Field(default=10.0, gt=0, le=100, description="factor on scores of words and regions")
    attention_scale: float = Field(
        default=4.0, gt=0, le=100, description="factor before the softmax over regions, by which words attend to them"
    )
    word_scale: float = Field(
        default=5.0, gt=0, le=100, description="factor on the cosine of a word and what it attends to"
    )
    aggregate: Literal["sum", "mean"] = Field(
        default="sum", description="over the words of a text; mean: long texts do not score higher"
    )
    chunk: int | None = Field(
        default=None, ge=1, description="texts compared at a time, less memory for more time; None: by size"
    )

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.global_weight or self.local_weight):
            raise ValueError("global_weight and local_weight are both 0, so there is nothing to learn; raise one")
        return self

    @property
    def contrast_reduction(self) -> Reduction:
        return "sum"

    def head(self, dim: int, samples: Samples) -> None:
        """None: nothing is learnt besides the encoders.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the model gives no features by position."""
        self.require_detail(model)

    def pair_loss(self, model: Embedder, head: nn.Module | None, pairs: Batch) -> Tensor:
        """Weighted sum of the two contrasts."""
        first, second = self.detail(model, pairs)
        siblings, parts = self.siblings(pairs), []
        # a term without weight is not even computed
        if self.global_weight:
            # in fp32, as a model's representations: under autocast embeddings have 16 bits
            u, v = (F.normalize(side.embedding.float(), dim=-1) for side in (first, second))
            parts.append(self.global_weight * info_nce(u, v, self.global_scale, siblings, reduction="sum"))
        if self.local_weight:
            local = local_contrast(
                first.positions,
                second.positions,
                first.mask,
                second.mask,
                siblings,
                scale=self.local_scale,
                attention_scale=self.attention_scale,
                word_scale=self.word_scale,
                aggregate=self.aggregate,
                reduction="sum",
                chunk=self.chunk,
            )
            parts.append(self.local_weight * local)
        return torch.stack(parts).sum()
