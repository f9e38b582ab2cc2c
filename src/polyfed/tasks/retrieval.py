"""Retrieval of one modality by another, by the pair losses of CreamFL and CLIP, and by ConVIRT's."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import nn

from polyfed.core.settings import require_default
from polyfed.data.samples import Samples
from polyfed.losses.info_nce import InfoNCE, Reduction
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.tasks.pairing import PairTask

_OF_OBJECTIVES = {"soft_contrastive": ("shift", "scale", "reduction"), "info_nce": ("temperature", "learn_temperature")}


class PairRetrieval(PairTask):
    """A contrastive loss of pairs; metrics as ``PairTask`` says."""

    short_name: ClassVar[str] = "retrieval"
    shapes_head: ClassVar[tuple[str, ...] | None] = ("objective", "reduction", "learn_temperature")

    objective: Literal["soft_contrastive", "info_nce"] = Field(
        default="soft_contrastive", description="loss: PCME's pair loss (CreamFL, FedAFD) or InfoNCE (CLIP)"
    )
    shift: float = Field(default=15.0, description="soft contrastive: first value of the learnable b")
    scale: float = Field(default=15.0, gt=0, description="soft contrastive: first value of the learnable a")
    reduction: Literal["sum", "mean"] = Field(
        default="sum", description="soft contrastive: over pairs; the sum of the papers needs gradient clipping"
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


class ConVIRT(PairTask):
    """Find the second modality of a sample by its first, and the other way round; metrics as ``PairTask`` says.

    The paper has ``temperature: 0.1, learn_temperature: false, weight: 0.75`` with pictures first. The image-text
    contrast of FedAID's released code is ``learn_temperature: false, reduction: sum``.
    """

    short_name: ClassVar[str] = "convirt"
    shapes_head: ClassVar[tuple[str, ...] | None] = ("learn_temperature", "weight", "reduction")

    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="(first) temperature; 0.1 in the paper")
    learn_temperature: bool = Field(default=True, description="whether the temperature is learnt")
    weight: float = Field(
        default=0.5, ge=0, le=1, description="of the direction from the first modality to the second (ConVIRT: 0.75)"
    )
    reduction: Reduction = Field(
        default="mean", description="of the two directions; sum, which is twice the mean, as FedAID's code"
    )

    @property
    def contrast_reduction(self) -> Reduction:
        """As ``reduction``."""
        return self.reduction

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The loss module with its temperature.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        return InfoNCE(self.temperature, learnable=self.learn_temperature, weight=self.weight, reduction=self.reduction)
