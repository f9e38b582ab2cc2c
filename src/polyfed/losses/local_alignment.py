"""Losses of words and regions: GLoRIA (Huang et al., ICCV 2021) and MGCA (Wang et al., NeurIPS 2022)."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from polyfed.losses.info_nce import Reduction, pair_cross_entropy
from polyfed.losses.precision import in_full_precision

Aggregate = Literal["sum", "mean"]

_BLOCK_VALUES = 1 << 24  # attention weights or context features held at a time: 64 MiB in fp32

_HIDDEN = -1e30  # stands for minus infinity: without any valid position what follows stays finite, with gradient 0


@in_full_precision
def local_contrast(
    regions: Float[Tensor, "b l d"],
    words: Float[Tensor, "b t d"],
    region_mask: Bool[Tensor, "b l"] | None = None,
    word_mask: Bool[Tensor, "b t"] | None = None,
    items: Int[Tensor, " b"] | None = None,
    *,
    scale: float = 10.0,
    attention_scale: float = 4.0,
    word_scale: float = 5.0,
    aggregate: Aggregate = "sum",
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of ``scale`` x ``word_region_scores`` in both directions: the paper's local contrastive loss.

    A pair without a valid region or word counts as 0, and is nobody's negative.

    Args:
        regions: features of the first side by position.
        words: features of the second, in the same order.
        region_mask: which regions are valid; None: all.
        word_mask: which words are valid; None: all.
        items: see ``info_nce``.
        scale: factor on the scores before the softmax over the batch; a higher one sharpens it.
        attention_scale: see ``word_region_scores``.
        word_scale: likewise.
        aggregate: likewise.
        reduction: see ``pair_cross_entropy``.
        chunk: see ``word_region_scores``.

    >>> regions = words = torch.eye(4).reshape(2, 2, 4)
    >>> [round(float(local_contrast(regions, words, scale=scale)), 3) for scale in (1.0, 10.0)]
    [0.007, 0.0]
    """
    scores = word_region_scores(
        regions,
        words,
        region_mask,
        word_mask,
        attention_scale=attention_scale,
        word_scale=word_scale,
        aggregate=aggregate,
        chunk=chunk,
    )
    logits = scale * scores
    hollow = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for mask in (region_mask, word_mask):
        hollow = hollow if mask is None else hollow | ~mask.any(1)
    if region_mask is not None or word_mask is not None:
        # hollow pairs see and are seen by nobody but themselves: a cross-entropy of 0, without gradient
        logits = logits.masked_fill(hollow[:, None] | hollow, -torch.inf)
        logits = torch.where(torch.diag(hollow), 0, logits)
    return pair_cross_entropy(logits, items, reduction=reduction)


@in_full_precision
def word_region_scores(
    regions: Float[Tensor, "b l d"],
    words: Float[Tensor, "c t d"],
    region_mask: Bool[Tensor, "b l"] | None = None,
    word_mask: Bool[Tensor, "c t"] | None = None,
    *,
    attention_scale: float = 4.0,
    word_scale: float = 5.0,
    aggregate: Aggregate = "sum",
    chunk: int | None = None,
) -> Float[Tensor, "b c"]:
    """How well each picture's regions explain each text's words: log sum_w exp(5 cos(context_w, word_w)).

    Dot products of regions and words go through a softmax over the words of the text; the result, times
    ``attention_scale``, through one over the regions. With these weights the regions add up to the context of a word.
    Features are taken as they are; only the cosine brings them to unit norm.

    Args:
        regions: features of pictures by position.
        words: features of texts by position, or the other way round for any two modalities.
        region_mask: which regions are valid; None: all.
        word_mask: which words are valid; None: all.
        attention_scale: gamma_1 in the paper, temp1 in its code; a higher one looks at fewer regions.
        word_scale: gamma_2 in the paper, temp2 in its code; a higher one lets the best words decide.
        aggregate: over words; ``mean``: log of the mean, so that long texts do not score higher.
        chunk: texts at a time; fewer need less memory, and (in training) a second pass over what was dropped. None:
            as many as ``_BLOCK_VALUES`` allow.

    >>> regions = words = torch.eye(4).reshape(2, 2, 4)
    >>> word_region_scores(regions, words).round(decimals=1)
    tensor([[5.6000, 0.7000],
            [0.7000, 5.6000]])
    """
    (b, length, dim), (texts, count, _) = regions.shape, words.shape
    size = chunk or max(1, _BLOCK_VALUES // max(1, b * count * max(length, dim)))
    block = partial(
        _scores, regions, region_mask, attention_scale=attention_scale, word_scale=word_scale, aggregate=aggregate
    )
    if size >= texts:
        return block(words, word_mask)
    masks = (None,) * -(-texts // size) if word_mask is None else torch.split(word_mask, size)
    # recomputed in the backward pass: what a block holds in between is what does not fit
    scores: list[Tensor] = [
        checkpoint(block, part, mask, use_reentrant=False, preserve_rng_state=False)
        for part, mask in zip(torch.split(words, size), masks, strict=True)
    ]
    return torch.cat(scores, dim=1)


def _scores(
    regions: Float[Tensor, "b l d"],
    region_mask: Bool[Tensor, "b l"] | None,
    words: Float[Tensor, "c t d"],
    word_mask: Bool[Tensor, "c t"] | None,
    *,
    attention_scale: float,
    word_scale: float,
    aggregate: Aggregate,
) -> Float[Tensor, "b c"]:
    attention = _attention(regions, region_mask, words, word_mask, attention_scale)
    contexts = torch.einsum("bclt,bld->bctd", attention, regions)
    similarity = word_scale * F.cosine_similarity(contexts, words, dim=-1)
    if word_mask is not None:
        similarity = similarity.masked_fill(~word_mask, _HIDDEN)
    scores = similarity.logsumexp(-1)
    if aggregate == "sum":
        return scores
    lengths = words.new_full((len(words),), words.shape[1]) if word_mask is None else word_mask.sum(1).clamp(min=1)
    return scores - lengths.to(words.dtype).log()


def _attention(
    regions: Tensor, region_mask: Tensor | None, words: Tensor, word_mask: Tensor | None, scale: float
) -> Float[Tensor, "b c l t"]:
    """Of each word to the regions; adds up to one over the regions."""
    similarity = torch.einsum("bld,ctd->bclt", regions, words)
    if word_mask is not None:
        similarity = similarity.masked_fill(~word_mask[:, None], _HIDDEN)
    # over words first, over regions then, as in the released code
    shares = scale * similarity.softmax(-1)
    if region_mask is not None:
        shares = shares.masked_fill(~region_mask[:, None, :, None], _HIDDEN)
    return shares.softmax(2)


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
        tau: temperature of attention and contrast; a higher one softens both.

    >>> tokens, weights = 3 * torch.eye(2)[None], torch.full((1, 2), 0.5)
    >>> [round(float(token_alignment(tokens, others, weights)), 3) for others in (tokens, torch.ones(1, 2, 2))]
    [0.0, 0.693]
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

    >>> token_weights(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[True, True, False]])).round(decimals=2)
    tensor([[0.7200, 0.2800, 0.0000]])
    """
    if mask is not None:
        attention = attention.masked_fill(~mask, torch.nan)
    low, high = (attention.nanquantile(q, dim=1, keepdim=True) for q in (cut, 1 - cut))
    clipped = attention.clamp(low, high).nan_to_num(0.0)
    return clipped / clipped.sum(1, keepdim=True).clamp(min=torch.finfo(clipped.dtype).tiny)


def uniform_weights(tokens: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None) -> Float[Tensor, "b n"]:
    """The same weight for each valid token; rows add up to 1, or are 0 where none is valid.

    >>> uniform_weights(torch.zeros(1, 3, 8), torch.tensor([[True, True, False]]))
    tensor([[0.5000, 0.5000, 0.0000]])
    """
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
        temperature: of the prediction; a higher one softens it.
        epsilon: see ``sinkhorn``.
        iterations: see ``sinkhorn``.

    >>> u, prototypes = torch.eye(2), torch.eye(2)
    >>> [round(float(prototype_alignment(u, v, prototypes)), 3) for v in (u, u.flip(0))]
    [0.007, 5.007]
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
        epsilon: a higher one softens the assignments.
        iterations: of scaling both; more use the prototypes more alike, 0 leaves the softmax of each row.

    >>> both_like_the_first = torch.tensor([[1.0, 0.0], [0.9, 0.0]])
    >>> [round(float(sinkhorn(both_like_the_first, epsilon, 20)[1, 1]), 2) for epsilon in (0.05, 1.0)]
    [0.73, 0.51]
    """
    logs = scores / epsilon
    for _ in range(iterations):
        # a softmax in logarithms is one scaling, and cannot overflow
        logs = logs.log_softmax(0).log_softmax(1)
    return logs.softmax(1)


def _masked(scores: Float[Tensor, "b n m"], mask: Bool[Tensor, "b m"] | None) -> Float[Tensor, "b n m"]:
    return scores if mask is None else scores.masked_fill(~mask[:, None], _HIDDEN)
