"""Masked autoencoding of images: masks, decoder and reconstruction loss (He et al., CVPR 2022)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from polyfed.losses.precision import in_full_precision
from polyfed.models.aligner import Aligned
from polyfed.models.blocks import EPS, SPREAD, FeatureEmbedding, FinalNorm, PatchEmbedding, initialise, stack
from polyfed.models.encoders.blocks import BlocksModule, BlocksTrunk


class Masking(NamedTuple):
    """Visible and hidden patches of each image.

    Attributes:
        visible: numbers of the visible patches, in the encoder's order.
        restore: index of each patch in (visible, then hidden).
        hidden: true where a patch is hidden.
    """

    visible: Int64[Tensor, "b k"]
    restore: Int64[Tensor, "b n"]
    hidden: Bool[Tensor, "b n"]

    def to(self, device: torch.device) -> Masking:
        """The same on ``device``."""
        return Masking(*(part.to(device) for part in self))


def hidden_count(patches: int, ratio: float) -> int:
    """Number of patches that ``ratio`` hides, rounded to the nearest; at least one is hidden and one visible.

    >>> [hidden_count(patches=16, ratio=ratio) for ratio in (0.6, 0.75)]
    [10, 12]
    """
    return min(max(int(ratio * patches + 0.5), 1), patches - 1)


def random_masking(batch: int, patches: int, ratio: float, generator: torch.Generator) -> Masking:
    """Masks of ``batch`` images, each drawn on its own, uniformly among those that hide as many patches.

    >>> masking = random_masking(batch=2, patches=4, ratio=0.75, generator=torch.Generator().manual_seed(0))
    >>> masking.visible.shape, masking.hidden.sum(1)
    (torch.Size([2, 1]), tensor([3, 3]))
    """
    # a sort of uniform numbers is a uniform permutation, row by row
    order = torch.rand(batch, patches, generator=generator).argsort(1)
    restore = order.argsort(1)
    seen = patches - hidden_count(patches, ratio)
    return Masking(order[:, :seen], restore, restore >= seen)


def maskable(encoder: nn.Module) -> BlocksModule | None:
    """Blocks of an encoder that can leave out patches, being over two or more patches or features; else None."""
    trunk = encoder.trunk if isinstance(encoder, Aligned) else encoder
    blocks = trunk.blocks if isinstance(trunk, BlocksTrunk) else trunk
    if not isinstance(blocks, BlocksModule) or not isinstance(blocks.embedding, PatchEmbedding | FeatureEmbedding):
        return None
    return blocks if blocks.embedding.grid[0] * blocks.embedding.grid[1] > 1 else None


def patches_of(encoder: BlocksModule, x: Float[Tensor, "b ..."]) -> Float[Tensor, "b n q"]:
    """Pixels of each patch of a ``maskable`` encoder, channels last; features by position are returned as given."""
    assert isinstance(encoder.embedding, PatchEmbedding | FeatureEmbedding)
    return encoder.embedding.patches(x)


def encode_visible(encoder: BlocksModule, x: Float[Tensor, "b ..."], masking: Masking) -> Float[Tensor, "b s w"]:
    """CLS and the visible patches after the blocks, which see nothing else."""
    tokens, _ = encoder.embedding(x)
    # positions are added before patches are left out, or they would be lost
    lead, patches = tokens[:, : encoder.embedding.prefix], tokens[:, encoder.embedding.prefix :]
    seen = patches.gather(1, masking.visible[..., None].expand(-1, -1, patches.shape[-1]))
    return encoder.encode(torch.cat([lead, seen], dim=1))


class PatchDecoder(nn.Module):
    """From CLS and visible patches to the pixels of all patches (MAE, section 3).

    A learnt token stands for every hidden patch; all get fixed sine-cosine positions (CLS none) and pass blocks of
    their own.

    Args:
        encoder: encoder of the images.
        width, depth, heads: sizes of the decoder's blocks.

    Raises:
        ValueError: ``width`` is not a multiple of 4 and of ``heads``.
    """

    positions: Tensor

    def __init__(self, encoder: BlocksModule, width: int, depth: int, heads: int) -> None:
        super().__init__()
        embedding = encoder.embedding
        assert isinstance(embedding, PatchEmbedding | FeatureEmbedding)
        self.embed = nn.Linear(embedding.width, width)
        self.blocks = stack(width, depth, heads)
        self.norm = FinalNorm(width, eps=EPS)
        self.pixels = nn.Linear(width, embedding.content)
        self.apply(initialise)
        # drawn after the layers: the order of draws is part of what a seed means
        self.mask = nn.Parameter(torch.randn(1, 1, width) * SPREAD)
        # not persistent: it follows from the settings, and need not cross
        self.register_buffer("positions", sine_cosine(embedding.grid, width), persistent=False)

    def forward(self, encoded: Float[Tensor, "b s w"], restore: Int64[Tensor, "b n"]) -> Float[Tensor, "b n q"]:
        """Pixels of each patch, channels last, in the order of the image."""
        tokens = self.embed(encoded)
        lead, seen = tokens[:, :1], tokens[:, 1:]
        # the same token for every hidden patch: only positions differ
        blank = self.mask.expand(len(seen), restore.shape[1] - seen.shape[1], -1).to(seen.dtype)
        mixed = torch.cat([seen, blank], dim=1)
        restored = mixed.gather(1, restore[..., None].expand(-1, -1, mixed.shape[-1])) + self.positions
        tokens = torch.cat([lead.to(restored.dtype), restored], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        out: Tensor = self.pixels(self.norm(tokens)[:, 1:])
        return out


def sine_cosine(grid: tuple[int, int], width: int) -> Float[Tensor, "n w"]:
    """Fixed positions of a grid's cells, row by row: half of the width encodes the row, half the column.

    Each half is (sin, cos) of position / 10000^(2i / half) (Vaswani et al. 2017).

    Raises:
        ValueError: ``width`` is not a multiple of 4.

    >>> sine_cosine((2, 2), 8).shape
    torch.Size([4, 8])
    """
    if width % 4:
        raise ValueError(f"width {width} is not a multiple of 4")
    rates = 10000.0 ** -(torch.arange(width // 4) / (width // 4))
    halves = [torch.arange(side)[:, None] * rates for side in grid]
    down, across = (torch.cat([angle.sin(), angle.cos()], dim=1) for angle in halves)
    return torch.cat([down.repeat_interleave(grid[1], 0), across.repeat(grid[0], 1)], dim=1)


@in_full_precision
def reconstruction_loss(
    predicted: Float[Tensor, "b n q"], patches: Float[Tensor, "b n q"], hidden: Bool[Tensor, "b n"], *, normalise: bool
) -> Float[Tensor, ""]:
    """Squared error, mean over the pixels of the ``hidden`` patches, at least one.

    ``normalise``: compare with (pixel - mean) / std of each patch, with which the paper learns better.
    """
    if normalise:
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        patches = (patches - mean) / (variance + EPS).sqrt()
    return (predicted - patches).square().mean(-1).masked_fill(~hidden, 0).sum() / hidden.sum()
