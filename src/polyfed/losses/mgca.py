"""Token and prototype alignment of MGCA (Wang et al., NeurIPS 2022)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.losses.precision import in_full_precision

_HIDDEN = -1e30  # stands for minus infinity: without any valid position what follows stays finite, with gradient 0


@in_full_precision
def token_alignment(
    tokens: Float[Tensor, "b n d"],
    others: Float[Tensor, "b m d"],
    weights: Float[Tensor, "b n"],
    mask: Bool[Tensor, "b n"] | None = None,
    other_mask: Bool[Tensor, "b m"] | None = None,
    tau: float = 0.1,
) -> Float[Tensor, ""]:
    """Contrast of each token with what it attends to in the other modality of its sample, mean over b.

    With unit vectors t_i of a sample and o_j of its other modality, a_i = sum_j softmax_j(t_i . o_j / tau) o_j, brought
    to unit norm. Cross-entropy of t_i . a_i / tau among t_i . a_k, and among t_k . a_i, over the valid k of the same
    sample; the mean of the two, added up with ``weights``.

    Where the released code differs: padding tokens are negatives there, and what patches of a ViT attend to is not
    brought to unit norm.

    Args:
        tokens: of one modality, of any norm.
        others: of the other modality of the same samples.
        weights: of the tokens, see ``token_weights``; 0 where not valid.
        mask: which tokens are valid; None: all.
        other_mask: which of the others are valid; None: all. A sample without any counts as 0.
        tau: temperature of attention and contrast.
    """
    tokens, others = F.normalize(tokens, dim=-1), F.normalize(others, dim=-1)
    attention = _masked(tokens @ others.mT / tau, other_mask).softmax(-1)
    logits = tokens @ F.normalize(attention @ others, dim=-1).mT / tau
    own = logits.diagonal(dim1=1, dim2=2)
    # both directions see valid tokens only: padding is nobody's negative
    row, column = (_masked(part, mask).logsumexp(-1) for part in (logits, logits.mT))
    losses = weights * ((row + column) / 2 - own)
    if mask is not None:
        losses = losses.masked_fill(~mask, 0)
    if other_mask is not None:
        losses = losses.masked_fill(~other_mask.any(1, keepdim=True), 0)
    return losses.sum() / len(tokens)


@torch.no_grad()
@in_full_precision
def token_weights(
    attention: Float[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None, cut: float = 0.1
) -> Float[Tensor, "b n"]:
    """Attention to each token, clipped to its quantiles ``cut`` and 1 - ``cut`` over valid tokens; rows add up to 1.

    Rows without a valid token are 0; so are tokens that are not valid.
    """
    if mask is not None:
        attention = attention.masked_fill(~mask, torch.nan)
    low, high = (attention.nanquantile(q, dim=1, keepdim=True) for q in (cut, 1 - cut))
    clipped = attention.clamp(low, high).nan_to_num(0.0)
    return clipped / clipped.sum(1, keepdim=True).clamp(min=torch.finfo(clipped.dtype).tiny)


def uniform_weights(tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n"]:
    """The same weight for each valid token; rows add up to 1, or are 0 where none is valid."""
    valid = tokens.new_ones(tokens.shape[:2]) if mask is None else mask.to(tokens.dtype)
    return valid / valid.sum(1, keepdim=True).clamp(min=1)


@in_full_precision
def prototype_alignment(
    u: Float[Tensor, "b d"],
    v: Float[Tensor, "b d"],
    prototypes: Float[Tensor, "k d"],
    temperature: float = 0.2,
    epsilon: float = 0.05,
    iterations: int = 3,
) -> Float[Tensor, ""]:
    """Swapped prediction (as SwAV): each side predicts to which prototypes the other is assigned, mean over b.

    -(q_u . log softmax(v C^T / temperature) + q_v . log softmax(u C^T / temperature)) / 2, with q the balanced
    assignments of ``sinkhorn`` over the batch, which are constants.

    Args:
        u: representations of one modality, unit L2 norm.
        v: representations of the other, in the same order.
        prototypes: C; brought to unit norm here, so their gradient is tangential.
        temperature: of the prediction.
        epsilon: see ``sinkhorn``.
        iterations: see ``sinkhorn``.
    """
    centres = F.normalize(prototypes, dim=-1)
    scores = u @ centres.T, v @ centres.T
    codes = (sinkhorn(score, epsilon, iterations) for score in scores)
    # each side is to predict the code of the other
    swapped = zip(codes, reversed(scores), strict=True)
    return torch.stack([-(q * (score / temperature).log_softmax(1)).sum(1).mean() for q, score in swapped]).mean()


@torch.no_grad()
@in_full_precision
def sinkhorn(scores: Float[Tensor, "b k"], epsilon: float = 0.05, iterations: int = 3) -> Float[Tensor, "b k"]:
    """How much each of k prototypes stands for each of b samples, every prototype being used alike; a constant.

    Sinkhorn-Knopp (Cuturi 2013), as in SwAV (Caron et al. 2020): columns, then rows of exp(scores / epsilon) are scaled
    in turn. In the end a row adds up to 1, and with many iterations a column to b / k. Computed with logarithms, so
    scores of any size will do.

    Args:
        scores: similarity of samples and prototypes; finite.
        epsilon: small: hard assignments.
        iterations: number of scalings of both; 0 leaves the softmax of each row.
    """
    logs = scores / epsilon
    for _ in range(iterations):
        # a softmax in logarithms is one scaling, and cannot overflow
        logs = logs.log_softmax(0).log_softmax(1)
    return logs.softmax(1)


def _masked(scores: Float[Tensor, "b n m"], mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, "b n m"]:
    return scores if mask is None else scores.masked_fill(~mask[:, None], _HIDDEN)
