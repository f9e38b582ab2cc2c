"""Tiles of a |P| x |P| matrix of logits that is never held, and the logits of kin that are moved out of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from polyfed.core.errors import ConfigError, PayloadError

RANGE = 80.0
"""Logits within +-80 bits need no shift: 2^80 x 10^9 terms and 2^-80 are both normal fp32 numbers."""

Families = tuple[Int[Tensor, " P"], Int[Tensor, " P"]]
"""First anchor and number of anchors of each anchor's item, on the CPU."""


class TileSize(NamedTuple):
    """Size of a tile."""

    rows: int
    columns: int

    @classmethod
    def suited(cls, device: torch.device) -> TileSize:
        """1 MiB tiles that stay in a core's cache, or 32 MiB ones that fill a GPU."""
        return cls(256, 1024) if device.type == "cpu" else cls(4096, 2048)


def working_dtype(local: Tensor, other: Tensor) -> torch.dtype:
    """The wider of both types, and fp32 at least."""
    return torch.promote_types(torch.promote_types(local.dtype, other.dtype), torch.float32)


def largest_logit(local: Tensor, other: Tensor) -> float:
    """Bound on |u_k . g_j| by Cauchy-Schwarz: 1 for unit vectors."""
    norms = [torch.linalg.vector_norm(side, dim=1, dtype=working_dtype(side, side)).amax() for side in (local, other)]
    return float(norms[0] * norms[1])


def families_of(items: Int[Tensor, " P"] | None, count: int) -> Families:
    """First anchor and number of anchors of each anchor's item, on the CPU."""
    if items is None:
        return torch.arange(count), torch.ones(count, dtype=torch.int64)
    items = items.cpu()
    if len(items) != count:
        raise PayloadError(f"{len(items)} item numbers for {count} anchors; give one an anchor")
    if bool((items.diff() < 0).any()):
        raise ConfigError("item numbers are not ascending; samples of an item must follow each other")
    _, index, sizes = torch.unique_consecutive(items, return_inverse=True, return_counts=True)
    return (sizes.cumsum(0) - sizes)[index], sizes[index]


class Near(NamedTuple):
    """Logits of samples against the anchors of their row's run, kin and others apart: -inf where not so."""

    positive: Float[Tensor, " s"]
    columns: Int[Tensor, "s f"]
    rivals: Float[Tensor, "s f"]
    rival_counts: Float[Tensor, "s f"]
    kin: Float[Tensor, "s f"]
    kin_counts: Float[Tensor, "s f"]

    def better_of(self, best: Float[Tensor, " s"], index: Int[Tensor, " s"]) -> tuple[Tensor, Tensor]:
        """The largest logit of a rival and its index, given those beyond the run; of equals the lowest index."""
        top, place = self.rivals.max(1)
        column = self.columns.gather(1, place[:, None]).squeeze(1)
        nearer = (top > best) | ((top == best) & (column < index))
        return torch.maximum(best, top), torch.where(nearer, column, index)


class Family:
    """Logits of a block's rows against a run of anchors that holds those of all items of the row's samples."""

    def __init__(
        self,
        families: Families,
        of: Int[Tensor, " s"],
        own: Int[Tensor, " s"],
        vectors: Float[Tensor, "r d"],
    ) -> None:
        starts, sizes = (part[own] for part in families)
        # a row without samples has an empty run
        self.starts = torch.full((len(vectors),), len(families[0])).scatter_reduce_(0, of, starts, "amin")
        ends = torch.zeros_like(self.starts).scatter_reduce_(0, of, starts + sizes, "amax")
        offsets = torch.arange(int((ends - self.starts).max()))
        self.columns = self.starts[:, None] + offsets
        self.real = self.columns < ends[:, None]
        self.first, self.last = int(self.starts.min()), int(ends.max())
        self.logits = vectors.new_full(self.columns.shape, -math.inf)

    def take(self, tile: Float[Tensor, "r m"], first: int) -> None:
        """Move them out of the tile that begins at column ``first``: -inf remains."""
        end = first + tile.shape[1]
        if self.last <= first or self.first >= end:
            return
        rows, offsets = (self.real & (self.columns >= first) & (self.columns < end)).nonzero(as_tuple=True)
        columns = (self.columns[rows, offsets] - first).to(tile.device)
        rows, offsets = rows.to(tile.device), offsets.to(tile.device)
        self.logits[rows, offsets] = tile[rows, columns]
        tile[rows, columns] = -math.inf

    def seen(
        self,
        families: Families,
        of: Int[Tensor, " s"],
        own: Int[Tensor, " s"],
        counts: Float[Tensor, " P"] | None,
        *,
        masked: bool,
    ) -> Near:
        """They, as the block's samples see them."""
        device, (starts, sizes) = self.logits.device, (part[own][:, None] for part in families)
        columns, real = self.columns[of], self.real[of]
        inside = columns.clamp_max(len(families[0]) - 1).to(device)
        times = real.to(device, self.logits.dtype) * (1 if counts is None else counts[inside])
        kin = ((columns >= starts) & (columns < starts + sizes)).to(device)
        # without items, the other samples of the own anchor are negatives
        kin_counts = times * kin if masked else kin.to(times)
        logits, rival_counts = self.logits[of.to(device)], times - kin_counts
        place = (own - self.starts[of])[:, None].to(device)
        return Near(
            logits.gather(1, place).squeeze(1),
            columns.to(device),
            logits.masked_fill(rival_counts <= 0, -math.inf),
            rival_counts,
            logits.masked_fill(~kin, -math.inf),
            kin_counts,
        )
