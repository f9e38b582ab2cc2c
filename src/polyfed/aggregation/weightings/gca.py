"""Weights by contrast with the other modalities."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.statistics import Statistic, Statistics
from polyfed.aggregation.weighting import Evidence, Weighting, log_share
from polyfed.core.errors import ConfigError

_SCORED: tuple[Statistic, ...] = ("positive", "negatives_lse")


class GCA(Weighting):
    """Global-local contrastive aggregation (CreamFL, Yu et al. 2023, Eqs. 4-5).

    A client's representation of a sample counts by how well it picks the server's representation of the same sample
    in the other modality out of the public set; with several others, by the mean of the scores. On class scores, by
    log softmax(scores / tau) of the true class.
    """

    needs_partner: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 4; below about 0.1 it selects")
    include_self: bool = Field(default=False, description="keep j = k in the sum of Eq. 4, as released")
    mask_siblings: bool = Field(default=False, description="leave captions of the same picture out of Eq. 4's sum")

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """Mean over the other modalities of Eq. 4's score; 0 for a sample without negatives."""
        if evidence.is_scores:
            return log_share(evidence.statistics(_SCORED, tau=self.tau))
        others = [modality for modality in evidence.server_outputs if modality != evidence.output]
        if not others:
            raise ConfigError(
                f"weighting 'gca' contrasts '{evidence.output}' with another modality, but the server has none; "
                "choose 'sed', which needs no other"
            )
        found = [evidence.compared(name, _SCORED, tau=self.tau, mask_siblings=self.mask_siblings) for name in others]
        return torch.stack([_score(statistics, self.include_self) for statistics in found]).mean(0)


def _score(statistics: Statistics, include_self: bool) -> Float[Tensor, " n"]:
    if include_self:
        return log_share(statistics)
    positive, negatives = statistics["positive"], statistics["negatives_lse"]
    # with no negative the difference is infinite, and one client would outweigh all
    return (positive - negatives).masked_fill_(negatives == -math.inf, 0)
