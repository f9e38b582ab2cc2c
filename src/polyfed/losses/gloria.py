"""Word-region contrast of GLoRIA (Huang et al., ICCV 2021)."""

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
        scale: factor on the scores before the softmax over the batch.
        attention_scale: see ``word_region_scores``.
        word_scale: likewise.
        aggregate: likewise.
        reduction: see ``pair_cross_entropy``.
        chunk: see ``word_region_scores``.
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
        attention_scale: gamma_1 in the paper, temp1 in its code.
        word_scale: gamma_2 in the paper, temp2 in its code.
        aggregate: over words; ``mean``: log of the mean, so that long texts do not score higher.
        chunk: texts at a time; fewer need less memory, and (in training) a second pass over what was dropped. None:
            as many as ``_BLOCK_VALUES`` allow.
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
