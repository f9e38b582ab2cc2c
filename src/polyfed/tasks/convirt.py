"""ConVIRT's objective (Zhang et al. 2022): InfoNCE whose two directions may weigh differently."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import nn

from polyfed.data.samples import Samples
from polyfed.losses.info_nce import InfoNCE, Reduction
from polyfed.tasks.pairing import PairTask


class ConVIRT(PairTask):
    """Find the second modality of a sample by its first, and the other way round; metrics as ``PairTask`` says.

    The paper has ``temperature: 0.1, learn_temperature: false, weight: 0.75`` with pictures first. The image-text
    contrast of FedAID's released code is ``learn_temperature: false, reduction: sum``.
    """

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
