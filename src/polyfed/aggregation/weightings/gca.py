"""Weights by contrast with the other modalities."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.statistics import row_statistics
from polyfed.aggregation.tiles import contrastive_scores
from polyfed.aggregation.weighting import OF_REPRESENTATIONS, Evidence, Weighting, log_share
from polyfed.core.effects import Where
from polyfed.core.errors import ConfigError


class GCA(Weighting):
    """Global-local contrastive aggregation (CreamFL, Yu et al. 2023, Eqs. 4-5).

    A client's representation of a sample counts by how well it picks the server's representation of the same sample
    in the other modality out of the public set; with several others, by the mean of the scores. On class scores, by
    log softmax(scores / tau) of the true class.
    """

    needs_partner: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True
    compares: ClassVar[bool] = True

    tau: float = Field(default=1.0, gt=0, description="temperature of Eq. 4; below about 0.1 it selects")
    include_self: Annotated[bool, Where(OF_REPRESENTATIONS)] = Field(
        default=False, description="keep j = k in the sum of Eq. 4, as released"
    )
    mask_siblings: Annotated[bool, Where(OF_REPRESENTATIONS)] = Field(
        default=False, description="leave captions of the same picture out of Eq. 4's sum"
    )

    def log_weights(self, evidence: Evidence) -> Float[Tensor, " n"]:
        """Mean over the other modalities of Eq. 4's score; 0 for a sample without negatives."""
        if evidence.is_scores:
            return log_share(evidence.statistics({"positive", "negatives_lse"}, tau=self.tau))
        others = [values for modality, values in evidence.server_outputs.items() if modality != evidence.output]
        if not others:
            raise ConfigError(
                f"weighting 'gca' contrasts '{evidence.output}' with another modality, but the server has none; "
                "choose 'sed', which needs no other"
            )
        return torch.stack([self._scores(evidence, other) for other in others]).mean(0)

    def _scores(self, evidence: Evidence, other: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        items = evidence.siblings(self.mask_siblings)
        if items is None:
            # the fast path: without siblings no item is looked for in the tiles
            return contrastive_scores(evidence.values, other, tau=self.tau, include_self=self.include_self)
        statistics = row_statistics(evidence.values, other, {"positive", "negatives_lse"}, tau=self.tau, items=items)
        if self.include_self:
            return log_share(statistics)
        positive, negatives = statistics["positive"], statistics["negatives_lse"]
        # with no negative the difference is infinite, and one client would outweigh all
        return (positive - negatives).masked_fill_(negatives == -math.inf, 0)
