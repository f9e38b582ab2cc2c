"""Retrieval of one modality by another, by the pair losses of CreamFL and CLIP."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from polyfed.core.effects import Only
from polyfed.data.samples import Samples
from polyfed.losses.info_nce import InfoNCE
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.tasks.pairing import PairTask

_SOFT, _INFO_NCE = Only(objective="soft_contrastive"), Only(objective="info_nce")


class PairRetrieval(PairTask):
    """A contrastive loss of pairs; metrics as ``PairTask`` says."""

    shapes_head: ClassVar[tuple[str, ...] | None] = ("objective", "reduction", "learn_temperature")

    objective: Literal["soft_contrastive", "info_nce"] = Field(
        default="soft_contrastive", description="loss: PCME's pair loss (CreamFL, FedAFD) or InfoNCE (CLIP)"
    )
    shift: Annotated[float, _SOFT] = Field(default=15.0, description="soft contrastive: first value of the learnable b")
    scale: Annotated[float, _SOFT] = Field(
        default=15.0, gt=0, description="soft contrastive: first value of the learnable a"
    )
    reduction: Annotated[Literal["sum", "mean"], _SOFT] = Field(
        default="sum",
        description="soft contrastive: over pairs; the sum of the papers needs gradient clipping",
    )
    temperature: Annotated[float, _INFO_NCE] = Field(
        default=0.07, ge=0.01, le=1.0, description="InfoNCE: (first) temperature"
    )
    learn_temperature: Annotated[bool, _INFO_NCE] = Field(
        default=True, description="InfoNCE: whether the temperature is learnt"
    )

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The loss module with its learnable scalars.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        if self.objective == "info_nce":
            return InfoNCE(self.temperature, learnable=self.learn_temperature)
        return SoftContrastive(self.shift, self.scale, reduction=self.reduction)
