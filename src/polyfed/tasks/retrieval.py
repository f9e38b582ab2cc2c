"""Retrieval of one modality by another, by the pair losses of CreamFL and CLIP."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import nn

from polyfed.core.effects import require_default
from polyfed.data.samples import Samples
from polyfed.losses.info_nce import InfoNCE
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.tasks.pairing import PairTask

_OF_OBJECTIVES = {
    "soft_contrastive": ("shift", "scale", "reduction"),
    "info_nce": ("temperature", "learn_temperature"),
}


class PairRetrieval(PairTask):
    """A contrastive loss of pairs; metrics as ``PairTask`` says."""

    shapes_head: ClassVar[tuple[str, ...] | None] = ("objective", "reduction", "learn_temperature")

    objective: Literal["soft_contrastive", "info_nce"] = Field(
        default="soft_contrastive", description="loss: PCME's pair loss (CreamFL, FedAFD) or InfoNCE (CLIP)"
    )
    shift: float = Field(default=15.0, description="soft contrastive: first value of the learnable b")
    scale: float = Field(default=15.0, gt=0, description="soft contrastive: first value of the learnable a")
    reduction: Literal["sum", "mean"] = Field(
        default="sum",
        description="soft contrastive: over pairs; the sum of the papers needs gradient clipping",
    )
    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="InfoNCE: (first) temperature")
    learn_temperature: bool = Field(default=True, description="InfoNCE: whether the temperature is learnt")

    @model_validator(mode="after")
    def _of_the_objective(self) -> Self:
        for objective, own in _OF_OBJECTIVES.items():
            if objective != self.objective:
                require_default(self, f"with objective: {self.objective}", *own)
        return self

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The loss module with its learnable scalars.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        if self.objective == "info_nce":
            return InfoNCE(self.temperature, learnable=self.learn_temperature)
        return SoftContrastive(self.shift, self.scale, reduction=self.reduction)
