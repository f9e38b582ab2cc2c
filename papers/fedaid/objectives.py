"""GLoRIA (Huang et al., ICCV 2021) and MGCA (Wang et al., NeurIPS 2022): the other objectives of FedAID's Table 2.

Losses of words and regions, of tokens and of prototypes, and the two tasks that weigh them.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings, require_default
from polyfed.data.samples import Batch, Samples
from polyfed.losses.info_nce import Reduction, info_nce, pair_cross_entropy
from polyfed.losses.precision import in_full_precision
from polyfed.models.aligner import Aligned, Detail
from polyfed.models.model import Embedder, Model
from polyfed.tasks.retrieval import PairTask

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

    A pair without a valid region or word counts as 0, and is not a negative.

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
        # hollow pairs are compared with themselves alone: a cross-entropy of 0, without gradient
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
    """Match of each image's regions with each text's words: log sum_w exp(5 cos(context_w, word_w)).

    Dot products of regions and words go through a softmax over the words of the text; the result, times
    ``attention_scale``, through one over the regions. With these weights the regions add up to the context of a word.
    Features are taken as they are; only the cosine brings them to unit norm.

    Args:
        regions: Features of images by position.
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
    """Weights of each word on the regions; they sum to one over the regions."""
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
        tokens: Tokens of one modality, of any norm.
        others: Tokens of the other modality of the same samples.
        weights: Weights of the tokens, see ``token_weights``; 0 where not valid.
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
    # both directions see valid tokens only: padding is not a negative
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
        temperature: Temperature of the prediction; a higher one softens it.
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


# ---- GLoRIA


class GLoRIA(PairTask):
    """global_weight L_global + local_weight L_local, both summed over the two directions, as in the released code.

    L_global is InfoNCE on the embeddings. L_local contrasts texts and images by how well the words of a text fit the
    regions that they attend to (``word_region_scores``). Regions are the positions of the first modality, words
    those of the second; a model must give both. Words here are tokens: the paper adds up the pieces of a word, which is
    left out. Metrics, which are of the embeddings alone, as in ``PairTask``.
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ()

    global_weight: float = Field(default=1.0, ge=0, description="weight of the contrast of embeddings")
    local_weight: float = Field(default=1.0, ge=0, description="weight of the contrast of words and regions")
    global_scale: float = Field(default=10.0, gt=0, le=100, description="factor on cosines of embeddings")
    local_scale: float = Field(default=10.0, gt=0, le=100, description="factor on scores of words and regions")
    attention_scale: float = Field(
        default=4.0, gt=0, le=100, description="factor before the softmax over regions, by which words attend to them"
    )
    word_scale: float = Field(
        default=5.0, gt=0, le=100, description="factor on the cosine of a word and what it attends to"
    )
    aggregate: Literal["sum", "mean"] = Field(
        default="sum", description="over the words of a text; mean: long texts do not score higher"
    )
    chunk: int | None = Field(
        default=None, ge=1, description="texts compared at a time, less memory for more time; None: by size"
    )

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.global_weight or self.local_weight):
            raise ValueError("global_weight and local_weight are both 0, so nothing is trained; raise one")
        return self

    @property
    def contrast_reduction(self) -> Reduction:
        return "sum"

    def head(self, dim: int, samples: Samples) -> None:
        """None: only the encoders are trained.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the model gives no features by position."""
        self.require_detail(model)

    def pair_loss(self, model: Embedder, head: nn.Module | None, pairs: Batch) -> Tensor:
        """Weighted sum of the two contrasts."""
        first, second = self.detail(model, pairs)
        siblings, parts = self.siblings(pairs), []
        # a term without weight is not even computed
        if self.global_weight:
            # in fp32, as a model's representations: under autocast embeddings have 16 bits
            u, v = (F.normalize(side.embedding.float(), dim=-1) for side in (first, second))
            parts.append(self.global_weight * info_nce(u, v, self.global_scale, siblings, reduction="sum"))
        if self.local_weight:
            local = local_contrast(
                first.positions,
                second.positions,
                first.mask,
                second.mask,
                siblings,
                scale=self.local_scale,
                attention_scale=self.attention_scale,
                word_scale=self.word_scale,
                aggregate=self.aggregate,
                reduction="sum",
                chunk=self.chunk,
            )
            parts.append(self.local_weight * local)
        return torch.stack(parts).sum()


# ---- MGCA


class InstanceAlignment(Settings):
    """InfoNCE on the embeddings, summed over the two directions."""

    weight: float = Field(default=1.0, gt=0, description="factor in the sum of the three")
    temperature: float = Field(default=0.07, ge=0.01, le=1.0, description="a higher one softens the contrast")


class TokenAlignment(Settings):
    """Each token against the others of its sample, by what it attends to in the other modality."""

    weight: float = Field(default=0.7, gt=0, description="factor in the sum of the three")
    temperature: float = Field(default=0.1, ge=0.01, le=1.0, description="a higher one softens attention and contrast")
    weights: Literal["attention", "uniform"] = Field(
        default="attention", description="of tokens within a sample: how the summary attends to them, or all alike"
    )


class PrototypeAlignment(Settings):
    """Each side of a sample predicts to which prototypes the other belongs."""

    weight: float = Field(default=1.0, gt=0, description="factor in the sum of the three")
    temperature: float = Field(default=0.2, ge=0.01, le=1.0, description="a higher one softens the prediction")
    epsilon: float = Field(default=0.05, gt=0, le=10, description="Sinkhorn: a higher one softens the assignments")
    iterations: int = Field(
        default=3, ge=1, le=1000, description="Sinkhorn: scalings; more use the prototypes more alike"
    )


class MGCA(PairTask):
    """Weighted sum of three alignments; metrics, which are of the embeddings alone, as in ``PairTask``.

    Written after the paper and its released code, of which the default is kept: tokens attend without weights of their
    own (the option of learnt attention layers is left out). Padding never counts as a negative, pieces of a word are
    tokens of their own, and the weight of prototypes is that of the released command line (0.5 in its constructor).
    """

    shapes_head: ClassVar[tuple[str, ...] | None] = ("prototypes", "freeze_prototypes_steps")

    instances: InstanceAlignment | None = Field(default=InstanceAlignment(), description="of samples; null: none")
    tokens: TokenAlignment | None = Field(default=TokenAlignment(), description="of tokens; null: none")
    assignments: PrototypeAlignment | None = Field(
        default=PrototypeAlignment(), description="of prototypes; null: none"
    )
    prototypes: int = Field(default=500, ge=2, description="number of prototypes")
    freeze_prototypes_steps: int = Field(
        default=100, ge=0, description="training steps in which prototypes stay as drawn (MGCA: the first epoch)"
    )

    @model_validator(mode="after")
    def _trains_something(self) -> Self:
        if not (self.instances or self.tokens or self.assignments):
            raise ValueError("instances, tokens and assignments are all null, so nothing is trained; set one")
        if self.assignments is None:
            require_default(self, "with assignments: null", "prototypes", "freeze_prototypes_steps")
        return self

    @property
    def contrast_reduction(self) -> Reduction:
        return "sum"

    def head(self, dim: int, samples: Samples) -> nn.Module:
        """The prototypes.

        Raises:
            ConfigError: the samples lack one of the two modalities.
        """
        self.require(samples)
        return PrototypeLayer(self.prototypes, dim, frozen_steps=self.freeze_prototypes_steps)

    def require_model(self, model: Model, samples: Samples) -> None:
        """Raise ConfigError if the model gives no features by position, or no attention to them where it is needed."""
        self.require_detail(model)
        if self.tokens is not None and self.tokens.weights == "attention":
            for modality in self.between:
                if not isinstance(model.encoders[modality], Aligned):
                    raise _no_attention(modality)

    def pair_loss(self, model: Embedder, head: nn.Module | None, pairs: Batch) -> Tensor:
        """Weighted sum of the three alignments.

        Raises:
            ConfigError: the model gives no features by position, or no attention to them where that is wanted.
        """
        if not isinstance(head, PrototypeLayer):
            raise TypeError("mgca needs the module that its head() made")
        sides = self.detail(model, pairs)  # one pass of each encoder for all three terms
        u, v = (F.normalize(side.embedding.float(), dim=-1) for side in sides)
        parts = []
        if self.instances is not None:
            scale, siblings = 1 / self.instances.temperature, self.siblings(pairs)
            parts.append(self.instances.weight * info_nce(u, v, scale, siblings, reduction=self.contrast_reduction))
        if self.tokens is not None:
            parts.append(self.tokens.weight * self._token_loss(self.tokens, sides))
        if self.assignments is not None:
            settings = self.assignments.temperature, self.assignments.epsilon, self.assignments.iterations
            parts.append(self.assignments.weight * prototype_alignment(u, v, head(), *settings))
        return torch.stack(parts).sum()

    def _token_loss(self, settings: TokenAlignment, sides: tuple[Detail, Detail]) -> Tensor:
        """Each modality once as the one that attends."""
        losses = []
        for modality, own, other in zip(self.between, sides, reversed(sides), strict=True):
            if settings.weights == "uniform":
                weights = uniform_weights(own.positions, own.mask)
            elif own.attention is None:
                raise _no_attention(modality)
            else:
                weights = token_weights(own.attention, own.mask)
            tau = settings.temperature
            losses.append(token_alignment(own.positions, other.positions, weights, own.mask, other.mask, tau))
        return losses[0] + losses[1]


def _no_attention(modality: str) -> ConfigError:
    return ConfigError(
        f"task.tokens.weights is attention, but the encoder of '{modality}' does not report how its summary attends to "
        "positions; set model.aligner with local, or tokens: {weights: uniform}"
    )


class PrototypeLayer(nn.Module):
    """Prototypes [k, d], constants during the first training steps.

    ``steps`` counts the calls in training mode with gradients. It is a buffer, and so part of a model's weights: it is
    sent, kept and averaged with them, and the mean of the clients' counts is the number of steps that the averaged
    prototypes stand for. A method that computes the loss several times per step counts each.
    """

    steps: Tensor

    def __init__(self, count: int, dim: int, *, frozen_steps: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(F.normalize(torch.randn(count, dim), dim=-1))
        self.frozen_steps = frozen_steps
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self) -> Float[Tensor, "k d"]:
        # evaluation counts no steps
        if not (self.training and torch.is_grad_enabled()):
            return self.weight
        # chosen on the device: to ask for the count would make every step wait for a GPU
        weight = torch.where(self.steps < self.frozen_steps, self.weight.detach(), self.weight)
        self.steps += 1
        return weight
