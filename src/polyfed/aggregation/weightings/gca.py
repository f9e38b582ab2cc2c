"""Weights by contrast with the other modalities."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.statistics import Statistic, Statistics, row_statistics
from polyfed.aggregation.tiles import TileSize
from polyfed.aggregation.weighting import Evidence, Weighting, log_share
from polyfed.core.errors import ConfigError, PayloadError

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


def contrastive_scores(
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    *,
    tau: float = 1.0,
    include_self: bool = False,
    valid: Bool[Tensor, " P"] | None = None,
    blocks: TileSize | None = None,
) -> Float[Tensor, " P"]:
    """s_k = log exp(u_k . g_k / tau) / sum_{j != k} exp(u_k . g_j / tau) for every public sample k (Eq. 4).

    The softmax of the scores over clients (Eq. 5) and the weighted sum (Eq. 6) are ``Ensemble``.

    Args:
        local: u, a client's representations of the public set in one modality.
        other: g, the global representations: of the other modality for GCA, of the same one for SED.
        tau: temperature (the paper has none: 1).
        include_self: whether j = k is part of the sum, as in the released code.
        valid: samples that the client sent; the others score -inf, and what stands in their rows is not
            looked at.
        blocks: size of a tile; None: suited to the device.

    Raises:
        PayloadError: shapes differ.
        ConfigError: tau is not positive, or the public set has a single sample and ``include_self`` is off.
    """
    if local.shape != other.shape:
        raise PayloadError(
            f"local representations have shape {tuple(local.shape)}, the global ones {tuple(other.shape)}; "
            "both must cover the same public set in the same width"
        )
    if len(local) == 1 and not include_self:
        raise ConfigError("the public set has 1 sample, so Eq. 4 has nothing to contrast with; use 2 or more")
    if valid is None:
        return _score(row_statistics(local, other, _SCORED, tau=tau, blocks=blocks), include_self)
    own = valid.nonzero().squeeze(1).to(local.device)
    scores = _score(row_statistics(local[own], other, _SCORED, own=own, tau=tau, blocks=blocks), include_self)
    return scores.new_full((len(local),), -math.inf).index_copy_(0, own, scores)


def _score(statistics: Statistics, include_self: bool) -> Float[Tensor, " n"]:
    if include_self:
        return log_share(statistics)
    positive, negatives = statistics["positive"], statistics["negatives_lse"]
    # with no negative the difference is infinite, and one client would outweigh all
    return (positive - negatives).masked_fill_(negatives == -math.inf, 0)
