"""Transformer parts with roles: embeddings of images, texts and features, attention, MLP, norms, and gated layers.

Gated linear layers are W + g W_out: the weights W_out of another modality behind a gate g that starts shut (FedCola,
section 4.2).
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from polyfed.data.view import InputSpec
from polyfed.models.encoder import check_patches, mismatch
from polyfed.models.towers import valid_positions

EPS = 1e-6
SPREAD = 0.02  # standard deviation of initial weights, as in BERT and ViT


class BlockNorm(nn.LayerNorm):
    """Norm before the attention or the MLP of a block."""

    role: ClassVar[str] = "norm"


class FinalNorm(nn.LayerNorm):
    """Norm after the last block."""

    role: ClassVar[str] = "final_norm"


class Attention(nn.Module):
    """Multi-head self-attention, queries, keys and values from one linear layer.

    Raises:
        ValueError: ``heads`` does not divide ``width``.

    >>> attention, x, mask = Attention(width=8, heads=2), torch.randn(1, 3, 8), torch.tensor([[True, True, False]])
    >>> attention(x, mask).shape, float(attention.leading(x, mask)[0, 2])
    (torch.Size([1, 3, 8]), 0.0)
    """

    role: ClassVar[str] = "attention"

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads {heads} does not divide width {width}")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def _projected(self, x: Float[Tensor, "b l w"]) -> tuple[Tensor, ...]:
        """Queries, keys and values [b, heads, l, w / heads]."""
        shape = (3, self.heads, x.shape[-1] // self.heads)
        parts: tuple[Tensor, ...] = self.qkv(x).unflatten(-1, shape).permute(2, 0, 3, 1, 4).unbind(0)
        return parts

    def leading(self, x: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l"]:
        """Attention of the first position to each, mean over the heads; rows sum to one, 0 where not valid."""
        # no fused kernel gives its weights: one row of them is computed again
        q, k, _ = self._projected(x)
        # in fp32, or 16 bits would round the softmax of long sequences
        scores = (q[:, :, :1] @ k.transpose(-1, -2)).squeeze(2).float() / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        attended: Tensor = scores.softmax(-1).mean(1)
        return attended

    def forward(self, x: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l w"]:
        """Attend to the positions where ``mask`` is true; each row needs at least one."""
        q, k, v = self._projected(x)
        # [b, 1, 1, l] broadcasts over heads and queries
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None])
        out: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """Two linear layers with an exact GELU between them."""

    role: ClassVar[str] = "mlp"

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "... w"]) -> Float[Tensor, "... w"]:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., ECCV 2016): in training a sample's branch is zero with chance ``rate``.

    Other branches are scaled by 1 / (1 - rate), which keeps the expectation.

    >>> DropPath(rate=0.5).eval()(torch.ones(1, 2)).tolist()
    [[1.0, 1.0]]
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b ..."]:
        """``x`` itself outside training and at rate 0; nothing is drawn then."""
        if not self.training or self.rate == 0:
            return x
        # one draw for each sample, whatever the width: a branch is dropped as a whole
        return x * (x.new_empty(x.shape[0], *(1,) * (x.dim() - 1)).bernoulli_(1 - self.rate) / (1 - self.rate))


class TransformerBlock(nn.Module):
    """Pre-norm transformer block (ViT): ``x + attention(norm1(x))``, then ``x + mlp(norm2(x))``.

    >>> TransformerBlock(width=8, heads=2, hidden=16)(torch.randn(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, width: int, heads: int, hidden: int, drop_path: float = 0.0, eps: float = EPS) -> None:
        super().__init__()
        self.norm1 = BlockNorm(width, eps=eps)
        self.attention = Attention(width, heads)
        self.norm2 = BlockNorm(width, eps=eps)
        self.mlp = Mlp(width, hidden)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l w"]:
        """Tokens after the block; ``mask`` is true at positions that may be attended to."""
        x = x + self.drop_path(self.attention(self.norm1(x), mask))
        out: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return out

    def leading(self, x: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l"]:
        """``Attention.leading`` of this block on its input."""
        return self.attention.leading(self.norm1(x), mask)


class PostBlock(nn.Module):
    """Post-norm transformer block (BERT): ``x = norm1(x + attention(x))``, then ``norm2(x + mlp(x))``.

    >>> PostBlock(width=8, heads=2, hidden=16)(torch.randn(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, width: int, heads: int, hidden: int, eps: float = 1e-12) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm1 = BlockNorm(width, eps=eps)
        self.mlp = Mlp(width, hidden)
        self.norm2 = BlockNorm(width, eps=eps)

    def forward(self, x: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l w"]:
        """Tokens after the block; ``mask`` is true at positions that may be attended to."""
        x = self.norm1(x + self.attention(x, mask))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out

    def leading(self, x: Float[Tensor, "b l w"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l"]:
        """``Attention.leading`` of this block on its input."""
        return self.attention.leading(x, mask)


def stack(
    width: int, depth: int, heads: int, expansion: float = 4, drop_path: float = 0.0, eps: float = EPS
) -> nn.ModuleList:
    """``depth`` blocks; stochastic depth grows linearly from 0 in the first to ``drop_path`` in the last.

    >>> [block.drop_path.rate for block in stack(width=8, depth=3, heads=2, drop_path=0.2)]
    [0.0, 0.1, 0.2]
    """
    # first blocks matter to all later ones, so they are dropped least
    rates = [drop_path * number / max(1, depth - 1) for number in range(depth)]
    return nn.ModuleList(TransformerBlock(width, heads, round(expansion * width), rate, eps) for rate in rates)


def initialise(module: nn.Module) -> None:
    """Normal weights, zero biases and a zero padding row for a linear, convolution or embedding layer."""
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
        nn.init.normal_(module.weight, std=SPREAD)
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)
    # normal_ has filled the padding row as well
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        nn.init.zeros_(module.weight[module.padding_idx])


Embedded = tuple[Float[Tensor, "b l w"], Bool[Tensor, "b l"] | None]


class Embedding(nn.Module):
    """From an input to tokens of width w with their positions, after ``prefix`` tokens that are not the input's."""

    role: ClassVar[str] = "embedding"
    prefix: ClassVar[int]

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @abstractmethod
    def forward(self, x: Tensor) -> Embedded:
        """Tokens [b, l, w] and a mask [b, l], true where valid, in each row at least once; None if all are."""


class _LedEmbedding(Embedding):
    """Tokens after a learnt CLS token."""

    prefix: ClassVar[int] = 1

    def __init__(self, width: int, count: int) -> None:
        super().__init__(width)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * SPREAD)
        self.positions = nn.Parameter(torch.randn(1, count + 1, width) * SPREAD)

    def led(self, tokens: Float[Tensor, "b n w"]) -> Float[Tensor, "b n+1 w"]:
        # positions are added to CLS as well (ViT)
        tokens = torch.cat([self.cls.expand(tokens.shape[0], -1, -1), tokens], dim=1)
        return tokens + self.positions[:, : tokens.shape[1]]


class PatchEmbedding(_LedEmbedding):
    """Images [b, c, h, w] to CLS and one token for each patch, row by row (ViT).

    ``grid`` is the number of patches, of side ``patch``, down and across; ``content`` the number of values of a patch.
    """

    def __init__(self, shape: tuple[int, int, int], width: int, patch: int) -> None:
        channels, height, across = shape
        super().__init__(width, (height // patch) * (across // patch))
        self.patch = patch
        self.grid = (height // patch, across // patch)
        self.content = channels * patch**2
        self.conv = nn.Conv2d(channels, width, patch, stride=patch)

    def patches(self, x: Float[Tensor, "b c down across"]) -> Float[Tensor, "b n q"]:
        (batch, channels), (down, across), p = x.shape[:2], self.grid, self.patch
        # channels last, as in the released code of MAE: the order in which a decoder rebuilds them
        tiles = x.reshape(batch, channels, down, p, across, p).permute(0, 2, 4, 3, 5, 1)
        return tiles.reshape(batch, down * across, p * p * channels)

    def forward(self, x: Float[Tensor, "b c down across"]) -> Embedded:
        return self.led(self.conv(x).flatten(2).transpose(1, 2)), None


class FeatureEmbedding(_LedEmbedding):
    """Features by position [b, l, f] to CLS and one token for each; positions that are all zero are padding."""

    def __init__(self, shape: tuple[int, int], width: int) -> None:
        super().__init__(width, shape[0])
        self.grid, self.content = (1, shape[0]), shape[1]
        self.linear = nn.Linear(shape[1], width)

    def patches(self, x: Float[Tensor, "b l f"]) -> Float[Tensor, "b l f"]:
        """The features themselves, which a masked autoencoder rebuilds of an image given by its features."""
        return x

    def forward(self, x: Float[Tensor, "b n f"]) -> Embedded:
        # (x != 0).any: padding of cached features is written as zeros
        return self.led(self.linear(x)), _first_valid(nn.functional.pad((x != 0).any(-1), (1, 0)))


class WordEmbedding(Embedding):
    """Token ids [b, l] to word + position + token type (0 everywhere), then a layer norm (BERT)."""

    prefix: ClassVar[int] = 0

    def __init__(self, spec: InputSpec, width: int) -> None:
        super().__init__(width)
        self.pad = spec.pad
        self.words = nn.Embedding(len(spec.vocabulary), width, padding_idx=spec.pad)
        self.positions = nn.Embedding(spec.shape[0], width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Int64[Tensor, "b l"]) -> Embedded:
        # token type 0 everywhere: there is one text, and pretrained tables have two types
        tokens = self.words(x) + self.positions.weight[: x.shape[1]] + self.types.weight[0]
        return self.norm(tokens), _first_valid(valid_positions(x, self.pad))


def embedding_of(spec: InputSpec, width: int, patch: int) -> Embedding:
    """The embedding of an encoder ``blocks`` for an input.

    Raises:
        ConfigError: the input is neither images nor token ids nor features by position, or patches do not fit.
    """
    # by the shape alone: no modality is known by its name
    match spec.shape, bool(spec.vocabulary):
        case (channels, height, across), False:
            shape = (channels, height, across)
            check_patches(shape, patch, "blocks")
            return PatchEmbedding(shape, width, patch)
        case (length, features), False:
            return FeatureEmbedding((length, features), width)
        case (_,), True:
            return WordEmbedding(spec, width)
    needs = "images [channels, height, width], token ids [length] with a vocabulary or features [length, width]"
    raise mismatch("blocks", needs, spec, "pixels, tokens or features with pool: tokens")


def _first_valid(mask: Bool[Tensor, "b l"]) -> Bool[Tensor, "b l"]:
    """The mask with its first column true, so that attention is finite without any token."""
    return torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], dim=1)


BLOCK_ROLES = ("attention", "mlp", "norm")
"""Roles of the parts of a transformer block."""

ROLES: Mapping[str, frozenset[str]] = {
    "blocks": frozenset(BLOCK_ROLES),
    "attention": frozenset(["attention"]),
    "mlp": frozenset(["mlp"]),
}
"""Parts of blocks that take weights of another modality -> their roles."""


class GatedWeight(nn.Module):
    """The effective weight W + g W_out of a linear layer (FedCola, section 4.2).

    With the gate g at zero, where it starts, it is W bit for bit, and the gradient of W_out is 0.

    Args:
        out: W_out, of the shape of W; it is copied.
        trainable: train W_out; if not, it has neither gradient nor optimiser state.

    >>> gated_weight = GatedWeight(out=torch.ones(1, 2))
    >>> gated_weight(torch.zeros(1, 2)).tolist(), gated_weight.gate.data.fill_(0.5).tolist()
    ([[0.0, 0.0]], [0.5])
    >>> gated_weight(torch.zeros(1, 2)).tolist()
    [[0.5, 0.5]]
    """

    def __init__(self, out: Float[Tensor, "o i"], *, trainable: bool = True) -> None:
        super().__init__()
        self.out = nn.Parameter(out.clone(), requires_grad=trainable)
        # at zero, training starts from the model that was sent
        self.gate = nn.Parameter(torch.zeros(1, device=out.device, dtype=out.dtype))

    def forward(self, weight: Float[Tensor, "o i"]) -> Float[Tensor, "o i"]:
        return torch.addcmul(weight, self.gate, self.out)


def linears(module: nn.Module, roles: frozenset[str]) -> dict[str, nn.Linear]:
    """The linear layers, by name, within blocks' parts of the given roles (attention, mlp).

    >>> list(linears(TransformerBlock(width=8, heads=2, hidden=16), frozenset(["mlp"])))
    ['mlp.fc1', 'mlp.fc2']
    """
    return {
        f"{name}.{inner}" if name and inner else name or inner: layer
        for name, part in module.named_modules()
        if getattr(part, "role", None) in roles
        for inner, layer in part.named_modules()
        if isinstance(layer, nn.Linear)
    }


@contextlib.contextmanager
def gated(module: nn.Module, outs: Mapping[str, Tensor], *, trainable: bool = True) -> Iterator[dict[str, GatedWeight]]:
    """Give linear layers of a module gates for the length of a block; afterwards W + g W_out is their plain weight.

    After an error the layers are plain again, with unspecified weights.

    Args:
        module: the module, changed in place.
        outs: name of a linear layer -> W_out, of the shape of its weight.
        trainable: train W_out.

    Yields:
        The gates by the name of their layer.

    >>> layer = nn.Sequential(nn.Linear(2, 1, bias=False))
    >>> with gated(layer, {"0": torch.ones(1, 2)}) as gates:
    ...     _ = layer[0].parametrizations.weight.original.data.zero_(), gates["0"].gate.data.fill_(0.5)
    >>> layer[0].weight.tolist()
    [[0.5, 0.5]]
    """
    gates: dict[str, GatedWeight] = {}
    layers: dict[str, Any] = {name: module.get_submodule(name) for name in outs}
    orders = {name: list(layer._parameters) for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            gates[name] = GatedWeight(outs[name].to(layer.weight), trainable=trainable)
            parametrize.register_parametrization(layer, "weight", gates[name])
        yield gates
    finally:
        for name in gates:
            if parametrize.is_parametrized(layer := layers[name]):
                # leaves W + g W_out as the plain weight: the compression trick of section 4.2
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
                # in the former order, on which sums over all parameters depend in their last bits
                layer._parameters = {key: layer._parameters[key] for key in orders[name]}


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that weight decay must spare: gates and their W_out.

    The gradient of W_out is 0 while its gate is shut; decay would shrink it all the same.
    """
    return [value for part in model.modules() if isinstance(part, GatedWeight) for value in part.parameters()]
