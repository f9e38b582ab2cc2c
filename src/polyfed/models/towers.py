"""Towers: a trunk that gives a pooled vector and local features, and the layers from these to an embedding.

Padding of sequences stands after the last valid position; nothing here waits for a device to report lengths.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field
from torch import Tensor, nn

_Module = TypeVar("_Module", bound=nn.Module)

MapNorm = Annotated[
    Literal["batch", "group"],
    Field(description="norm of maps: by batch, or by sample over 32 groups of channels (or the largest that fits)"),
]
"""Published forms have batch norms. Group norms (Wu and He, ECCV 2018) look at each sample by itself: DP-SGD needs it,
and statistics of unlike clients do not mix (Hsieh et al., ICML 2020)."""


def laid_out(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Images with channels last: 1.2 to 1.6 times the training speed of the default layout on a CPU core."""
    # vmap lacks it
    return x if torch._C._are_functorch_transforms_active() else x.contiguous(memory_format=torch.channels_last)


def normed(model: _Module, norm: MapNorm) -> _Module:
    """The model, with group norms in place of its batch norms if ``norm`` is ``group``."""
    for parent in list(model.modules()) if norm == "group" else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(parent, name, nn.GroupNorm(math.gcd(32, channels), channels, eps=child.eps))
    return model


def valid_positions(tokens: Int64[Tensor, "b l"], pad: int) -> Bool[Tensor, "b l"]:
    """True where a token is not padding.

    >>> valid_positions(torch.tensor([[5, 7, 0]]), pad=0)
    tensor([[ True,  True, False]])
    """
    return tokens != pad


def lengths_of(mask: Bool[Tensor, "b l"]) -> Int64[Tensor, " b"]:
    """Number of valid positions of each row, at least 1: an empty text is read as one padding token."""
    return mask.sum(1).clamp(min=1)


def masked_mean(x: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"]) -> Float[Tensor, "b c"]:
    """Mean over the valid positions; zero where there is none.

    >>> masked_mean(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2.]])
    """
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def last_valid(x: Float[Tensor, "b l c"], lengths: Int64[Tensor, " b"]) -> Float[Tensor, "b c"]:
    """The last valid position of each row.

    >>> last_valid(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([2]))
    tensor([[3.]])
    """
    # gathered, not indexed row by row: no length is fetched from the device
    return x.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, x.shape[-1])).squeeze(1)


def reversed_valid(x: Float[Tensor, "b l c"], lengths: Int64[Tensor, " b"]) -> Float[Tensor, "b l c"]:
    """The valid part of each row back to front; padding stays where it is.

    >>> reversed_valid(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([2])).flatten()
    tensor([3., 1., 9.])
    """
    position = torch.arange(x.shape[1], device=x.device)
    mirrored = lengths.unsqueeze(1) - 1 - position
    return x.gather(1, torch.where(mirrored >= 0, mirrored, position).unsqueeze(-1).expand_as(x))


def trimmed(tokens: Int64[Tensor, "b l"], pad: int) -> Int64[Tensor, "b m"]:
    """Drop columns that are all padding; on the CPU only, as elsewhere the width would cost a sync.

    Not while traced for an export or a compilation either, as the width depends on the data.

    >>> trimmed(torch.tensor([[5, 7, 0, 0], [5, 0, 0, 0]]), pad=0)
    tensor([[5, 7],
            [5, 0]])
    """
    if tokens.device.type != "cpu" or tokens.shape[1] == 0 or torch.compiler.is_compiling():
        return tokens
    return tokens[:, : max(1, int(valid_positions(tokens, pad).sum(1).max()) if len(tokens) else 1)]


class LocalFeatures(NamedTuple):
    """Features of a batch by a trunk.

    Attributes:
        pooled: one vector a sample [b, c].
        local: features by position (of a map, or of tokens) [b, l, e].
        mask: true at valid positions [b, l]; None if all are.
        led: the first position is the pooled vector itself, as CLS may be.
    """

    pooled: Float[Tensor, "b c"]
    local: Float[Tensor, "b l e"]
    mask: Bool[Tensor, "b l"] | None = None
    led: bool = False


Positions = tuple[Float[Tensor, "b l d"], Bool[Tensor, "b l"] | None]
"""Features of width d by position, and which positions are valid (None: all)."""


@runtime_checkable
class Splittable(Protocol):
    """An encoder whose trunk can be had without what projects it to width d."""

    def split(self) -> tuple[nn.Module, int]:
        """The trunk, input -> ``LocalFeatures``, and the width of its pooled vector; the encoder is used up."""
        ...


class Positioned(Protocol):
    """An encoder that gives features by position in addition to its embedding.

    They are of width d, after its projection, and without PIE. Where it pools by mean, has no PIE and nothing but
    a linear projection, their mean over valid positions is the embedding.
    """

    def positions(self, x: Tensor) -> Positions:
        """Features [b, l, d] and their mask [b, l], true where valid; None if all are."""
        ...


def positioned(encoder: nn.Module) -> TypeGuard[Positioned]:
    # of the class: an encoder may well keep position embeddings under this name
    return callable(getattr(type(encoder), "positions", None))


def from_map(features: Float[Tensor, "b c h w"]) -> LocalFeatures:
    """The mean of a map and its positions, row by row.

    >>> features = from_map(torch.ones(2, 6, 3, 3))
    >>> features.pooled.shape, features.local.shape
    (torch.Size([2, 6]), torch.Size([2, 9, 6]))
    """
    return LocalFeatures(features.mean((2, 3)), features.flatten(2).transpose(1, 2))


def grid_side(positions: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"] | None) -> int | None:
    """Side of the square grid of positions, with or without a summary before them; None: they are not square.

    >>> grid_side(torch.zeros(2, 10, 6), None), grid_side(torch.zeros(2, 7, 6), None)
    (3, None)
    """
    side = math.isqrt(positions.shape[1])
    is_square = side * side in (positions.shape[1], positions.shape[1] - 1)
    return side if is_square and (mask is None or bool(mask.all())) else None


def to_map(positions: Float[Tensor, "b l c"]) -> Float[Tensor, "b c side side"]:
    """Map [b, c, side, side] of positions in a square grid, without a summary that may come before them.

    >>> to_map(torch.zeros(2, 10, 6)).shape  # a summary and nine positions
    torch.Size([2, 6, 3, 3])
    """
    side = math.isqrt(positions.shape[1])
    # views whose batch may vary in an export
    return torch.unflatten(positions[:, -side * side :].transpose(1, 2), 2, (side, side))


class PIE(nn.Module):
    """One-head attention over local features, added to a pooled embedding, as in CreamFL and FedAFD.

    ``LayerNorm(out + sigmoid(fc(sum_l a_l x_l)))`` with ``a = softmax_l(w2 tanh(w1 x))``; not L2-normalised,
    which ``Model.represent`` does.

    Args:
        in_dim: width of the local features.
        dim: width d of the embedding.
        hidden: width of the attention; half of ``in_dim`` by default.

    >>> pie = PIE(in_dim=6, dim=4)
    >>> pie(torch.randn(2, 4), torch.randn(2, 9, 6)).shape
    torch.Size([2, 4])
    """

    def __init__(self, in_dim: int, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or max(1, in_dim // 2)
        self.w1 = nn.Linear(in_dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, 1, bias=False)
        self.fc = nn.Linear(in_dim, dim)
        self.norm = nn.LayerNorm(dim)
        for layer in (self.w1, self.w2, self.fc):
            # as the code of PVSE, which CreamFL and FedAFD take over
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(
        self, out: Float[Tensor, "b d"], local: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"] | None = None
    ) -> Float[Tensor, "b d"]:
        """Embedding from the pooled, projected ``out`` and the local features; ``mask`` is true where valid.

        A row without a valid position attends evenly, so it stays finite.
        """
        attention = self.attention(local, mask)
        embedding: Tensor = self.norm(out + torch.sigmoid(self.fc((attention.unsqueeze(1) @ local).squeeze(1))))
        return embedding

    def attention(self, local: Float[Tensor, "b l c"], mask: Bool[Tensor, "b l"] | None = None) -> Float[Tensor, "b l"]:
        """Attention weights; each row sums to one over its valid positions."""
        scores: Tensor = self.w2(torch.tanh(self.w1(local))).squeeze(-1).float()
        if mask is not None:
            # not -inf: a row without valid positions would be NaN
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).to(local.dtype)


class EncoderTower(nn.Module):
    """Trunk, then a linear layer on the pooled vector, then (with ``pie``) attention over the local features.

    Args:
        trunk: maps the input to ``LocalFeatures``.
        width: width c of its pooled vector.
        dim: width d of the embedding.
        pie: width e of its local features if a PIE block is wanted, else None.
        dropout: share of the pooled vector dropped in training.
        project: module from the pooled vector to the embedding; by default a linear layer.
    """

    def __init__(
        self,
        trunk: nn.Module,
        width: int,
        dim: int,
        *,
        pie: int | None = None,
        dropout: float = 0.0,
        project: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.trunk, self.width = trunk, width
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(width, dim) if project is None else project
        self.pie = None if pie is None else PIE(pie, dim)

    def split(self) -> tuple[nn.Module, int]:
        return self.trunk, self.width

    def forward(self, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding, not normalised."""
        pooled, local, mask, _ = self.trunk(x)
        # PIE adds to the projection, and so comes after it
        out: Tensor = self.project(self.dropout(pooled))
        return out if self.pie is None else self.pie(out, local, mask)

    def positions(self, x: Tensor) -> Positions:
        """The local features, each projected as ``forward`` does the pooled vector; without PIE.

        Raises:
            ValueError: the local features have another width than the pooled vector.
        """
        _, local, mask, _ = self.trunk(x)
        if local.shape[-1] != self.width:
            raise ValueError(
                f"local features of width {local.shape[-1]} do not fit the projection from {self.width}; "
                "fuse vectors rather than positions"
            )
        return self.project(self.dropout(local)), mask
