"""Contrastive scores of CreamFL's global-local aggregation (Yu et al. 2023, Eq. 4)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyfed.aggregation.approximate import bf16_scores, cumulant_scores, sampled_scores
from polyfed.aggregation.tiles import Blocks, Contrast, full_product, tiled_scores, working_dtype
from polyfed.core.errors import ConfigError, PayloadError

Backend = Literal["exact", "bf16", "cumulant2", "sampled"]

CHECKED_ROWS = 256
"""Rows on which an approximate backend is compared with the exact scores."""

logger = logging.getLogger(__name__)


def contrastive_scores(
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    *,
    tau: float = 1.0,
    include_self: bool = False,
    valid: Bool[Tensor, " P"] | None = None,
    backend: Backend = "exact",
    generator: torch.Generator | None = None,
    samples: int = 1024,
    tolerance: float = 0.02,
    blocks: Blocks | None = None,
) -> Float[Tensor, " P"]:
    """s_k = log exp(u_k . g_k / tau) / sum_{j != k} exp(u_k . g_j / tau) for every public sample k (Eq. 4).

    The softmax of the scores over clients (Eq. 5) and the weighted sum (Eq. 6) are ``Ensemble``. Exact scores
    are computed in tiles within 10 % to 25 % of the time of the matrix product alone and a few MiB of
    scratch; at temperature 1 an approximate backend is faster still. An approximate backend is compared with
    the exact scores on random rows; where it strays by more than ``tolerance`` the exact scores are computed
    instead, with a warning.

    Args:
        local: u, a client's representations of the public set in one modality.
        other: g, the global representations: of the other modality for GCA, of the same one for SED.
        tau: temperature (the paper has none: 1).
        include_self: whether j = k is part of the sum, as in the released code.
        valid: samples that the client sent; the others score -inf, and what stands in their rows is not
            looked at.
        backend: ``exact``; ``bf16`` products; ``cumulant2``, mean and variance of the logits in place of the
            sum, O(P d^2), for tau near 1; ``sampled``, the sum estimated from ``samples`` anchors.
        generator: on the CPU; draws the anchors and the rows to compare. Needed unless exact.
        samples: anchors of ``sampled``.
        tolerance: largest admitted error of an approximate score, about the relative error of a client's
            weight.
        blocks: size of a tile; None: suited to the device.

    Raises:
        PayloadError: shapes differ.
        ConfigError: tau is not positive, a generator is missing, or the public set has a single sample and
            ``include_self`` is off.
    """
    _check(local, other, tau, include_self)
    own = torch.arange(len(local)) if valid is None else valid.nonzero().squeeze(1).cpu()
    scores = local.new_full((len(local),), -math.inf, dtype=working_dtype(local, other))
    if len(own) == 0:
        return scores
    contrast = Contrast(tau, include_self, blocks or Blocks.suited(local.device))
    if backend == "exact":
        found = tiled_scores(local, other, own, contrast, full_product)
    else:
        draw = _required(generator, backend)
        found = _APPROXIMATIONS[backend](local, other, own, contrast, samples, draw)
        if _strays(found, local, other, own, contrast, draw, backend, tolerance):
            found = tiled_scores(local, other, own, contrast, full_product)
    return scores.index_copy_(0, own.to(scores.device), found)


Approximation = Callable[[Tensor, Tensor, Tensor, Contrast, int, torch.Generator], Tensor]

_APPROXIMATIONS: Mapping[str, Approximation] = MappingProxyType(
    {"bf16": bf16_scores, "cumulant2": cumulant_scores, "sampled": sampled_scores}
)


def _strays(
    found: Float[Tensor, " n"],
    local: Float[Tensor, "P d"],
    other: Float[Tensor, "P d"],
    own: Int[Tensor, " n"],
    contrast: Contrast,
    generator: torch.Generator,
    backend: str,
    tolerance: float,
) -> bool:
    """Whether approximate scores miss the exact ones by more than ``tolerance`` on random rows; warns."""
    rows = torch.randperm(len(own), generator=generator)[:CHECKED_ROWS].sort().values
    exact = tiled_scores(local, other, own[rows], contrast, full_product)
    error = float((found[rows.to(found.device)] - exact).abs().max())
    if error <= tolerance:
        return False
    logger.warning(
        "score backend '%s' is off by %.3g on %d rows, more than %g, at tau %g; using 'exact'",
        *(backend, error, len(rows), tolerance, contrast.tau),
    )
    return True


def _check(local: Tensor, other: Tensor, tau: float, include_self: bool) -> None:
    if local.shape != other.shape:
        raise PayloadError(
            f"local representations have shape {tuple(local.shape)}, the global ones {tuple(other.shape)}; "
            "both must cover the same public set in the same width"
        )
    if not tau > 0:
        raise ConfigError(f"tau is {tau}; a temperature must be positive")
    if len(local) == 1 and not include_self:
        raise ConfigError("the public set has 1 sample, so Eq. 4 has nothing to contrast with; use 2 or more")


def _required(generator: torch.Generator | None, backend: str) -> torch.Generator:
    if generator is None:
        raise ConfigError(f"score backend '{backend}' has no generator to draw with; pass one, or use 'exact'")
    return generator
